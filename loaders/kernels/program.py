"""Run one program on one crop, with as few passes over the pixels as possible.

The result is that of the ops in order, to the bit, but operations are deferred beside the stored pixels:

- ``table``: the chain of per-channel operations since the pixels were last written, composed exactly;
- ``warp``: the last warp, if it has not been carried out, and ``fill``: what its black has become since.

A table and a NEAREST warp commute, except in the fill, which is kept apart. So per-channel operations and one warp cost
nothing until the finished view is written. Operations that mix channels or pixels first ``settle`` what is pending.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from loaders.jit import jit
from loaders.kernels import pointwise, tables
from loaders.kernels.lower import BLUR_TAPS
from loaders.kernels.neighbourhood import RING, gaussian_blur, sharpness
from loaders.kernels.pointwise import Scalar
from loaders.kernels.warp import gather
from loaders.views.ops import END, Op

AUTO_CONTRAST, EQUALIZE, IDENTITY = int(Op.AUTO_CONTRAST), int(Op.EQUALIZE), int(Op.IDENTITY)
BRIGHTNESS, COLOR, CONTRAST = int(Op.BRIGHTNESS), int(Op.COLOR), int(Op.CONTRAST)
POSTERIZE, SOLARIZE, SHARPNESS = int(Op.POSTERIZE), int(Op.SOLARIZE), int(Op.SHARPNESS)
ROTATE, SHEAR_X, SHEAR_Y = int(Op.ROTATE), int(Op.SHEAR_X), int(Op.SHEAR_Y)
TRANSLATE_X, TRANSLATE_Y = int(Op.TRANSLATE_X), int(Op.TRANSLATE_Y)
HUE, GRAYSCALE, GAUSSIAN_BLUR = int(Op.HUE), int(Op.GRAYSCALE), int(Op.GAUSSIAN_BLUR)


class Scratch(NamedTuple):
    """Memory of one thread; see ``scratch``."""

    pixels: NDArray[np.uint32]  # (3, S * S): the crop, and two to work in
    table: NDArray[np.uint8]  # (3, 256)
    fill: NDArray[np.uint8]  # (3,)
    warp: NDArray[np.int32]  # (8,)
    partial: NDArray[np.uint32]  # (4, 3, 256), for histograms
    counts: NDArray[np.uint32]  # (3, 256)
    ring: NDArray[np.uint16]  # these three: see gaussian_blur
    padded: NDArray[np.uint32]
    sums: NDArray[np.int32]


def scratch(size: int) -> Scratch:
    """Allocate the memory of one thread, about 15 * S * S bytes."""
    return Scratch(
        pixels=np.zeros((3, size * size), np.uint32),
        table=np.zeros((3, 256), np.uint8),
        fill=np.zeros(3, np.uint8),
        warp=np.zeros(8, np.int32),
        partial=np.zeros((4, 3, 256), np.uint32),
        counts=np.zeros((3, 256), np.uint32),
        ring=np.zeros(RING * 4 * size, np.uint16),
        padded=np.zeros(size + 2 * BLUR_TAPS, np.uint32),
        sums=np.zeros(4 * size, np.int32),
    )


@jit
def run(codes: NDArray[np.uint8], params: NDArray[np.int32], size: int, s: Scratch) -> tuple[int, bool]:
    """Run a program on ``s.pixels[0]``, which stays as it is.

    Returns which of ``s.pixels`` holds the result, and whether ``s.warp`` is still to be carried out; ``s.table`` (and
    outside of the warp ``s.fill``) is to be applied in any case.
    """
    tables.reset(s.table)
    at, tabled, warped = 0, False, False
    for i in range(codes.size):
        code, param = codes[i], params[i]
        if code == END:
            break
        if code in (ROTATE, SHEAR_X, SHEAR_Y, TRANSLATE_X, TRANSLATE_Y):
            if warped:
                at, tabled = settle(size, at, tabled, warped, s), False
            _begin_warp(param, s)
            warped = True
        elif code == POSTERIZE:
            tables.then_posterize(s.table, s.fill, param[0])
            tabled = True
        elif code == SOLARIZE:
            tables.then_solarize(s.table, s.fill, param[0])
            tabled = True
        elif code in (AUTO_CONTRAST, EQUALIZE):
            if warped:
                at, tabled, warped = settle(size, at, tabled, warped, s), False, False
            _extend_by_histogram(code, at, tabled, s)
            tabled = True
        elif code in (BRIGHTNESS, CONTRAST):
            base = 0
            if code == CONTRAST:
                if tabled or warped:
                    at, tabled, warped = settle(size, at, tabled, warped, s), False, False
                base = pointwise.mean_luma(s.pixels[at])
            if tabled or warped or not _mixes_later(codes, i + 1):
                tables.then_blend(s.table, s.fill, base, _factor(param))
                tabled = True
            else:  # the pixels must be brought up to date soon anyway, and arithmetic is faster than a table
                pointwise.blend_constant(s.pixels[at], base, _factor(param), s.pixels[_other(at)])
                at = _other(at)
        elif code != IDENTITY and not (code == GAUSSIAN_BLUR and param[6] == 0):
            if tabled or warped:
                at, tabled, warped = settle(size, at, tabled, warped, s), False, False
            _mix(code, param, size, s.pixels[at], s, s.pixels[_other(at)])
            at = _other(at)
    return at, warped


@jit
def _begin_warp(param: NDArray[np.int32], s: Scratch) -> None:
    for k in range(param.size):
        s.warp[k] = param[k]
    s.fill[0] = s.fill[1] = s.fill[2] = 0


@jit
def settle(size: int, at: int, tabled: bool, warped: bool, s: Scratch) -> int:
    """Carry out what is pending; return which of ``s.pixels`` holds the result."""
    if tabled:
        tables.apply(s.pixels[at], s.table, s.pixels[_other(at)])
        tables.reset(s.table)
        at = _other(at)
    if warped:
        gather(s.pixels[at], size, s.warp, pointwise.join(s.fill[0], s.fill[1], s.fill[2]), s.pixels[_other(at)])
        at = _other(at)
    return at


@jit
def _mix(
    code: int, param: NDArray[np.int32], size: int, source: NDArray[np.uint32], s: Scratch, out: NDArray[np.uint32]
) -> None:
    """Apply an operation that mixes the channels of a pixel, or neighbouring pixels."""
    if code == COLOR:
        pointwise.color(source, _factor(param), out)
    elif code == GRAYSCALE:
        pointwise.grayscale(source, out)
    elif code == HUE:
        pointwise.shift_hue(source, param[0], out)
    elif code == SHARPNESS:
        sharpness(source, size, _factor(param), s.sums, out)
    elif code == GAUSSIAN_BLUR:
        gaussian_blur(source, size, param, s.ring, s.padded, s.sums, out)


@jit
def _extend_by_histogram(code: int, at: int, tabled: bool, s: Scratch) -> None:
    if code == AUTO_CONTRAST and not tabled:
        tables.extremes(s.pixels[at], s.counts)
    else:
        tables.histogram(s.pixels[at], s.table, s.partial, s.counts)
    if code == AUTO_CONTRAST:
        tables.then_auto_contrast(s.table, s.counts)
    else:
        tables.then_equalize(s.table, s.counts)


@jit
def _mixes_later(codes: NDArray[np.uint8], start: int) -> bool:
    """Tell whether an operation from ``start`` on will settle what is pending."""
    for i in range(start, codes.size):
        if codes[i] == END:
            return False
        if codes[i] in (COLOR, CONTRAST, SHARPNESS, HUE, GRAYSCALE, GAUSSIAN_BLUR):
            return True
    return False


@jit
def _other(at: int) -> int:
    """Return a buffer to write to: never the crop, which other views start from."""
    return 2 if at == 1 else 1


@jit
def _factor(param: NDArray[np.int32]) -> Scalar:
    return param[:1].view(np.float32)[0]
