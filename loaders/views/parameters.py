"""Describe contrastive views by numbers: what was done to an image.

A view is a row of :data:`PARAMETERS`. What was not done has the value of doing nothing: 1 for a factor, else 0.
"""

import numpy as np
from numpy.typing import NDArray

from loaders.views.ops import Op
from loaders.views.plan import PlannedBatch

PARAMETERS = (
    *("centre_y", "centre_x", "height", "width"),  # of the crop, as shares of the image
    "flip",
    *("brightness", "contrast", "saturation", "hue"),  # factors; the hue's shift as a share of the circle
    *("grey", "blur", "solarize"),  # 0 or 1; sigma in pixels; 0 or 1
    *("brightness_place", "contrast_place", "saturation_place", "hue_place"),  # 0, 1, ... in the program, else 0
)
_JITTER = (Op.BRIGHTNESS, Op.CONTRAST, Op.COLOR, Op.HUE)


def view_parameters(planned: PlannedBatch, sizes: NDArray[np.int32], views: int) -> NDArray[np.float32]:
    """Describe the first ``views`` views of samples of ``sizes`` (B, 2): (V, B, 16)."""
    codes, magnitudes = planned.codes[:, :views], planned.magnitudes[:, :views]  # (B, V, P)

    def of(op: Op, without: float, values: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the value at the view's ``op`` (B, V), or ``without`` where it has none."""
        there = codes == op
        return np.where(there.any(2), (values * there).sum(2), np.float32(without))

    boxes = planned.boxes[:, :views] / np.tile(sizes, 2)[:, None].astype(np.float32)  # top, left, height, width
    places = np.broadcast_to(np.arange(codes.shape[2], dtype=np.float32), codes.shape)
    columns = [
        *np.moveaxis(boxes[..., :2] + boxes[..., 2:] / 2, 2, 0),
        *np.moveaxis(boxes[..., 2:], 2, 0),
        planned.flips[:, :views],
        *(of(op, 0.0 if op == Op.HUE else 1.0, magnitudes) for op in _JITTER),
        of(Op.GRAYSCALE, 0.0, np.ones_like(magnitudes)),
        of(Op.GAUSSIAN_BLUR, 0.0, magnitudes),
        of(Op.SOLARIZE, 0.0, np.ones_like(magnitudes)),
        *(of(op, 0.0, places) for op in _JITTER),
    ]
    return np.ascontiguousarray(np.stack(columns, 2).swapaxes(0, 1), np.float32)
