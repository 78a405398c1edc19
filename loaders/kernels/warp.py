"""Warp pixels like Pillow's NEAREST, and write finished views.

A warp is an index map in 16.16 fixed point (see ``loaders.kernels.lower``). Along a row of the output both source
coordinates are linear, so the outputs whose source lies inside the image form one interval, found by division, and the
loops need no bounds checks. Per-channel tables pending before or after the warp are applied to each value as it is
fetched.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from loaders.jit import jit
from loaders.kernels.pointwise import Pixels, Scalar, channel, copy


@jit
def _interval(start: Scalar, step: Scalar, size: int) -> tuple[int, int]:
    """Solve 0 <= start + step * x < size * 2**16: a half-open interval of x."""
    limit = size * 65536 - 1
    if step == 0:
        return (0, 1 << 40) if 0 <= start <= limit else (0, 0)
    if step > 0:
        return -(start // step), (limit - start) // step + 1
    return -((limit - start) // -step), start // -step + 1


@jit
def inside(warp: NDArray[np.int32], y: int, size: int) -> tuple[Scalar, Scalar]:
    """Return the half-open interval of x whose source pixel exists, in row ``y``."""
    first, last = _interval(np.int64(warp[2]) + np.int64(warp[1]) * y, np.int64(warp[0]), size)
    first_y, last_y = _interval(np.int64(warp[5]) + np.int64(warp[4]) * y, np.int64(warp[3]), size)
    first = min(max(first, first_y, 0), size)
    return first, max(min(last, last_y, size), first)


@jit
def _row_start(warp: NDArray[np.int32], y: int) -> tuple[Scalar, Scalar]:
    """Return source coordinates, in fixed point, of the first pixel of row ``y``."""
    return np.int64(warp[2]) + np.int64(warp[1]) * y, np.int64(warp[5]) + np.int64(warp[4]) * y


@jit
def gather(source: Pixels, size: int, warp: NDArray[np.int32], fill: Scalar, out: Pixels) -> None:
    """Carry out a warp; the pixel ``fill`` goes outside."""
    step_x, step_y = np.int64(warp[0]), np.int64(warp[3])
    for y in range(size):
        row = out[y * size : (y + 1) * size]
        first, last = inside(warp, y, size)
        for x in range(first):
            row[x] = fill
        for x in range(last, size):
            row[x] = fill
        across, down = _row_start(warp, y)
        if step_x == 65536 and step_y == 0:  # one run of pixels: ShearX and the translations
            start = (down >> 16) * size + (across >> 16)
            copy(source[start + first : start + last], row[first:last])
        else:
            for x in range(first, last):
                index = ((down + step_y * x) >> 16) * size + ((across + step_x * x) >> 16)
                row[x] = source[np.uint64(index)]


@jit
def write(source: Pixels, lookup: NDArray[Any], out: NDArray[Any]) -> None:
    """Look every value up in ``lookup`` (3, 256) and store it in ``out`` (S, S, 3)."""
    flat = out.reshape(-1)
    for i in range(source.size):
        _store(source[i], lookup, flat, i)


@jit
def write_warped(
    source: Pixels, size: int, warp: NDArray[np.int32], lookup: NDArray[Any], fill: NDArray[Any], out: NDArray[Any]
) -> None:
    """Write through a pending warp; the values ``fill`` (3,) go outside."""
    step_x, step_y = np.int64(warp[0]), np.int64(warp[3])
    for y in range(size):
        row = out[y].reshape(-1)
        first, last = inside(warp, y, size)
        _store_fill(fill, row, 0, first)
        _store_fill(fill, row, last, size)
        across, down = _row_start(warp, y)
        if step_x == 65536 and step_y == 0:
            start = (down >> 16) * size + (across >> 16)
            for x in range(first, last):
                _store(source[np.uint64(start + x)], lookup, row, x)
        else:
            for x in range(first, last):
                index = ((down + step_y * x) >> 16) * size + ((across + step_x * x) >> 16)
                _store(source[np.uint64(index)], lookup, row, x)


@jit
def _store(pixel: Scalar, lookup: NDArray[Any], row: NDArray[Any], x: int) -> None:
    at = np.uint64(3 * x)  # unsigned: spares numba's test for negative indices
    row[at] = lookup[0, channel(pixel, 0)]
    row[at + np.uint64(1)] = lookup[1, channel(pixel, 1)]
    row[at + np.uint64(2)] = lookup[2, channel(pixel, 2)]


@jit
def _store_fill(fill: NDArray[Any], row: NDArray[Any], first: int, last: int) -> None:
    for x in range(first, last):
        row[3 * x], row[3 * x + 1], row[3 * x + 2] = fill[0], fill[1], fill[2]
