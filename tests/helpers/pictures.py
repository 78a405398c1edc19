"""Images for the pixel tests, and programs of augmentations against Pillow's result."""

from collections.abc import Iterable
from functools import cache
from typing import Any

import numpy as np
import skimage.data
from numpy.typing import NDArray
from PIL import Image

from loaders.kernels import pillow
from loaders.kernels.cpu import CpuExecutor
from loaders.kernels.lower import lower
from loaders.views.ops import END, Op
from loaders.views.plan import ViewLayout


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


GREY_LEVELS = (0.0, 0.0, 0.0), (1 / 255, 1 / 255, 1 / 255)  # mean and deviation that make floats of 0 to 255
Program = list[tuple[Op, float]]


def run_on_cpu(images: NDArray[np.uint8], programs: list[Program]) -> NDArray[np.uint8]:
    """Image i through program i."""
    length = max(map(len, programs)) or 1
    codes = np.full((len(programs), 1, length), END, np.uint8)
    magnitudes = np.zeros(codes.shape, np.float32)
    for i, program in enumerate(programs):
        for k, (op, magnitude) in enumerate(program):
            codes[i, 0, k], magnitudes[i, 0, k] = op, magnitude
    size = images.shape[1]
    flips = np.zeros((len(images), 1), np.uint8)
    inputs = (images[:, None], flips, codes, lower(codes, magnitudes, size))
    return grey_levels_on_cpu(ViewLayout(1, 0, 0, (0,)), size, inputs)[0]


def grey_levels_on_cpu(layout: ViewLayout, size: int, inputs: Iterable[NDArray[Any]]) -> NDArray[np.uint8]:
    """The views before normalisation, uint8 (T, B, S, S, 3)."""
    return CpuExecutor(layout, size, *GREY_LEVELS)(*inputs).round().astype(np.uint8)


def assert_equal_to_pillow(images: NDArray[np.uint8], programs: list[Program]) -> None:
    """Every image through every program."""
    pairs = [(image, program) for image in images for program in programs]
    views = run_on_cpu(np.stack([image for image, _ in pairs]), [program for _, program in pairs])
    for view, (image, program) in zip(views, pairs, strict=True):
        codes, magnitudes = [int(op) for op, _ in program], [np.float32(m) for _, m in program]
        expected = np.asarray(pillow.view(image, False, codes, magnitudes))
        differing = int((view != expected).sum())
        assert differing == 0, f"{differing} of {view.size} values differ after {program}"
