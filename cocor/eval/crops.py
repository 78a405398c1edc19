"""Plan the crops of an evaluation, the same for every loader, nothing random.

full      the central square of the shorter side: Resize(224), CenterCrop(224)
central   7/8 of it: Resize(256), CenterCrop(224), the usual view of ImageNet models
ten       four corners and the centre of Resize(256), each also mirrored: torchvision's TenCrop(224)
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import numpy.typing as npt

from loaders.views.ops import END
from loaders.views.plan import PlannedBatch, ViewLayout, ViewPlan

Crop = Literal["full", "central", "ten"]

_SHARE = 0.875  # 224 of 256


@dataclass(frozen=True)
class CropPlan(ViewPlan):
    """View plan of originals only: one crop of each image, or ten, view-major."""

    contrastive: tuple = ()
    lengths: tuple[int, ...] = ()
    crop: Crop = "full"

    @property
    def views(self) -> int:
        return 10 if self.crop == "ten" else 1

    @cached_property
    def layout(self) -> ViewLayout:
        return ViewLayout(0, self.views, 0, tuple(range(self.views)))

    @property
    def program_length(self) -> int:
        return 1

    def draw(
        self, epoch: int | npt.NDArray[np.int64], index: npt.NDArray[np.int64], sizes: npt.NDArray[np.int32]
    ) -> PlannedBatch:
        shape = len(index), self.views
        flips = np.zeros(shape, np.uint8)
        flips[:, 5:] = 1
        index, boxes = np.ascontiguousarray(index, np.int64), self.boxes(np.asarray(sizes, np.int32))
        ops, levels = np.full((*shape, 1), END, np.uint8), np.zeros((*shape, 1), np.float32)
        return PlannedBatch(index, boxes, flips, ops, levels, np.zeros((0, shape[0], 14), np.uint8))

    def boxes(self, sizes: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """Compute (B, C, 4) top, left, height, width of the crops of images of ``sizes`` (B, 2).

        Ten crops are TenCrop's: corners, centre, then the same mirrored.
        """
        shorter = sizes.min(1)
        side = shorter if self.crop == "full" else np.maximum(1, np.rint(shorter * _SHARE)).astype(np.int32)
        bottom, right = (sizes - side[:, None]).T
        zero = np.zeros_like(side)
        tops, lefts = [bottom // 2], [right // 2]
        if self.crop == "ten":
            tops = [zero, zero, bottom, bottom, bottom // 2]
            # A mirrored picture's left corner shows what is on the right.
            lefts = [zero, right, zero, right, right // 2]
            tops, lefts = tops * 2, [*lefts, right, zero, right, zero, right // 2]
        boxes = [np.stack([top, left, side, side], axis=1) for top, left in zip(tops, lefts, strict=True)]
        return np.ascontiguousarray(np.stack(boxes, axis=1), np.int32)
