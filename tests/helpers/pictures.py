"""Images for the pixel tests: photographs that come with scikit-image, and generated ones for the special cases."""

from functools import cache

import numpy as np
import skimage.data
from numpy.typing import NDArray
from PIL import Image


@cache
def photographs(size: int) -> NDArray[np.uint8]:
    """(6, size, size, 3): colour, grey and very dark pictures, resized."""
    sources = [
        skimage.data.astronaut(),
        skimage.data.coffee(),
        skimage.data.chelsea(),
        skimage.data.rocket(),
        skimage.data.immunohistochemistry(),
        np.stack([skimage.data.camera()] * 3, axis=-1),
    ]
    return np.stack([np.asarray(Image.fromarray(s).resize((size, size), Image.Resampling.BILINEAR)) for s in sources])


@cache
def generated(size: int) -> NDArray[np.uint8]:
    """(8, size, size, 3): noise, one colour, almost one colour, a ramp, a checkerboard, a narrow range, one channel."""
    rng = np.random.default_rng(size)
    y, x = np.mgrid[:size, :size]
    noise = rng.integers(0, 256, (size, size, 3))
    constant = np.broadcast_to([37, 128, 255], noise.shape)
    almost = constant.copy()
    almost[size // 2, size // 3] = [38, 0, 254]
    ramp = np.stack([x * 255 // max(size - 1, 1), y * 255 // max(size - 1, 1), (x + y) % 256], axis=-1)
    checkerboard = np.repeat(((x + y) % 2 * 255)[..., None], 3, axis=-1)
    narrow = rng.integers(120, 131, (size, size, 3))
    red = noise * [1, 0, 0]
    black = np.zeros_like(noise)
    return np.stack([noise, constant, almost, ramp, checkerboard, narrow, red, black]).astype(np.uint8)


def pictures(size: int) -> NDArray[np.uint8]:
    """(14, size, size, 3) uint8."""
    return np.concatenate([photographs(size), generated(size)])
