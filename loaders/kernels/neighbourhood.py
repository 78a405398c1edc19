"""Sharpness and GaussianBlur: the operations that look at a pixel's neighbours.

Both work on the bytes of the pixel words, four to a pixel; the unused fourth is zero and stays so.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from loaders.jit import jit
from loaders.kernels.lower import BLUR_TAPS
from loaders.kernels.pointwise import Pixels, Scalar, blend, copy

RING = 32  # rows of the horizontal pass kept at a time: a power of two above 2 * 11 + 1
LAST = RING - 1


@jit
def sharpness(source: Pixels, size: int, factor: Scalar, sums: NDArray[np.int32], out: Pixels) -> None:
    """Blend with Pillow's SMOOTH filter; the border of one pixel is copied.

    Scratch: ``sums`` (4 * S,).
    """
    copy(source, out)
    before, target = source.view(np.uint8), out.view(np.uint8)
    for y in range(1, size - 1):
        _add_rows(before, (y - 1) * 4 * size, sums)
        _sharpen_row(before, y * 4 * size, sums, np.float32(factor), target)


@jit
def _add_rows(values: NDArray[np.uint8], start: int, sums: NDArray[np.int32]) -> None:
    above = np.uint64(start)
    line, below = above + np.uint64(sums.size), above + np.uint64(2 * sums.size)
    for i in range(sums.size):
        j = np.uint64(i)
        sums[i] = np.int32(values[above + j]) + np.int32(values[line + j]) + np.int32(values[below + j])


@jit
def _sharpen_row(
    values: NDArray[np.uint8], start: int, sums: NDArray[np.int32], factor: Scalar, out: NDArray[np.uint8]
) -> None:
    line = np.uint64(start + 4)
    for i in range(sums.size - 8):
        j = np.uint64(i)
        value = np.int32(values[line + j])
        total = np.int32(sums[j] + sums[j + np.uint64(4)] + sums[j + np.uint64(8)] + np.int32(4) * value)
        # (total + 6) // 13: the rounded thirteenth, by a reciprocal that is exact up to 13 * 255
        smooth = np.uint32(np.int32(total + np.int32(6)) * np.int32(2521)) >> np.uint32(15)
        out[line + j] = blend(np.float32(np.int32(smooth)), np.float32(value), factor)


@jit
def mirrored(index: int, size: int) -> int:
    """Reflect an index without repeating the edge, as often as needed."""
    if size == 1:
        return 0
    index = abs(index) % (2 * size - 2)
    return min(index, 2 * size - 2 - index)


@jit
def gaussian_blur(
    source: Pixels,
    size: int,
    params: NDArray[np.int32],
    ring: NDArray[np.uint16],
    padded: Pixels,
    sums: NDArray[np.int32],
    out: Pixels,
) -> None:
    """Blur rows into 8.8 fixed point, then columns, with the weights of ``lower``.

    Scratch: ``ring`` (32 * 4 * S,), ``padded`` (S + 24,), ``sums`` (4 * S,).
    """
    radius, width = np.int64(params[6]), 4 * size
    weights = np.zeros(BLUR_TAPS + 1, np.int32)  # and a zero, as taps are added two at a time
    for k in range(BLUR_TAPS):
        weights[k] = (params[k // 2] >> (16 * (k % 2))) & 0xFFFF
    mirror = np.empty(size + 2 * BLUR_TAPS, np.int64)  # of -12 .. S + 11
    rows = np.empty_like(mirror)  # where the mirrored row is in the ring
    for i in range(mirror.size):
        mirror[i] = mirrored(i - BLUR_TAPS, size)
        rows[i] = (mirror[i] & LAST) * width
    values, target = padded.view(np.uint8), out.view(np.uint8)
    done = 0
    for y in range(size):
        while done < size and done <= y + radius:
            _pad(source, done * size, size, radius, mirror, padded)
            _blur_row(values, radius, weights, sums)
            _shift_down(sums, 7, ring, (done & LAST) * width)
            done += 1
        _weigh(ring, (y & LAST) * width, weights[0], 1 << 22, sums)
        at = y + BLUR_TAPS
        for k in range(1, radius + 1, 2):
            above, below = rows[at - k], rows[at + k]
            next_above, next_below = rows[at - k - 1], rows[at + k + 1]
            _add_pairs(ring, above, below, weights[k], next_above, next_below, weights[k + 1], sums)
        _shift_down(sums, 23, target, y * width)


@jit
def _blur_row(values: NDArray[np.uint8], radius: Scalar, weights: NDArray[np.int32], sums: NDArray[np.int32]) -> None:
    first = 4 * BLUR_TAPS
    _weigh(values, first, weights[0], 64, sums)
    for k in range(1, radius + 1, 2):
        left, right = first - 4 * k, first + 4 * k
        _add_pairs(values, left, right, weights[k], left - 4, right + 4, weights[k + 1], sums)


@jit
def _pad(source: Pixels, start: int, size: int, radius: Scalar, mirror: NDArray[np.int64], out: Pixels) -> None:
    first = np.uint64(start)
    for x in range(size):
        out[np.uint64(BLUR_TAPS) + np.uint64(x)] = source[first + np.uint64(x)]
    for i in range(BLUR_TAPS - radius - 1, BLUR_TAPS):
        j = out.size - 1 - i
        out[i], out[j] = source[start + mirror[i]], source[start + mirror[j]]


# The inner loops take flat arrays and offsets, unsigned to spare numba's test for negative indices: with few arrays in
# sight the compiler can rule out overlaps and vectorise, and slices would cost as much as the arithmetic.


@jit
def _weigh(values: NDArray[Any], start: Scalar, weight: Scalar, bias: Scalar, sums: NDArray[np.int32]) -> None:
    weight, bias, start = np.int32(weight), np.int32(bias), np.uint64(start)
    for i in range(sums.size):
        sums[i] = weight * np.int32(values[start + np.uint64(i)]) + bias


@jit
def _add_pairs(
    values: NDArray[Any],
    a: Scalar,
    b: Scalar,
    weight: Scalar,
    c: Scalar,
    d: Scalar,
    next_weight: Scalar,
    sums: NDArray[np.int32],
) -> None:
    a, b, c, d = np.uint64(a), np.uint64(b), np.uint64(c), np.uint64(d)
    for i in range(sums.size):
        j = np.uint64(i)
        pair = np.int32(np.int32(values[a + j]) + np.int32(values[b + j]))
        next_pair = np.int32(np.int32(values[c + j]) + np.int32(values[d + j]))
        sums[i] += weight * pair + next_weight * next_pair


@jit
def _shift_down(sums: NDArray[np.int32], bits: Scalar, out: NDArray[Any], start: Scalar) -> None:
    bits, start = np.uint32(bits), np.uint64(start)
    for i in range(sums.size):
        out[start + np.uint64(i)] = np.uint32(sums[i]) >> bits
