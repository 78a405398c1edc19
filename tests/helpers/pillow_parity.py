"""Programs of augmentations against Pillow's result."""

import numpy as np
from numpy.typing import NDArray

from loaders.kernels import pillow
from loaders.kernels.cpu import CpuExecutor
from loaders.kernels.lower import lower
from loaders.views.ops import END, Op
from loaders.views.plan import ViewLayout

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
    executor = CpuExecutor(ViewLayout(1, 0, 0, (0,)), size, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
    flips = np.zeros((len(images), 1), np.uint8)
    return executor.execute_uint8(images[:, None], flips, codes, lower(codes, magnitudes, size))[0]


def assert_equal_to_pillow(images: NDArray[np.uint8], programs: list[Program]) -> None:
    """Every image through every program."""
    pairs = [(image, program) for image in images for program in programs]
    views = run_on_cpu(np.stack([image for image, _ in pairs]), [program for _, program in pairs])
    for view, (image, program) in zip(views, pairs, strict=True):
        codes, magnitudes = [int(op) for op, _ in program], [np.float32(m) for _, m in program]
        expected = np.asarray(pillow.view(image, False, codes, magnitudes))
        differing = int((view != expected).sum())
        assert differing == 0, f"{differing} of {view.size} values differ after {program}"
