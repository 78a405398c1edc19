"""Programs of augmentations against Pillow's result."""

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loaders.kernels import pillow
from loaders.kernels.cpu import CpuExecutor
from loaders.kernels.lower import lower
from loaders.views.ops import END, Op
from loaders.views.plan import ViewLayout

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
