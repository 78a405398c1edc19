"""Operations on single pixels, over whole images, in Pillow's arithmetic.

An image here is a flat uint32 array, one word a pixel, 0x00BBGGRR as in Pillow: a warp then moves one word a pixel, and
the loops below are plain lane-wise arithmetic that the compiler vectorises. Source and destination must be different
arrays, otherwise it cannot. Everything is integer or single precision, in Pillow's order of operations where that
decides a bit.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from loaders.jit import jit

Pixels = NDArray[np.uint32]
Scalar = Any  # a number whose width the compiler must know, such as np.int32: numba would compute in 64 bits otherwise


@jit
def copy(source: Pixels, out: Pixels) -> None:
    for i in range(out.size):  # a slice assignment would be several times slower
        out[i] = source[i]


@jit
def pack(crop: NDArray[np.uint8], out: Pixels) -> None:
    """Pack (S, S, 3) uint8 into words; on even sides four pixels from three words."""
    values, mask = crop.reshape(-1), np.uint32(0xFFFFFF)
    if crop.shape[0] % 2 == 0:
        words = values.view(np.uint32)
        for i in range(out.size // 4):
            a, b, c = words[3 * i], words[3 * i + 1], words[3 * i + 2]
            out[4 * i] = a & mask
            out[4 * i + 1] = np.uint32(np.uint32(a >> np.uint32(24)) | np.uint32(b << np.uint32(8))) & mask
            out[4 * i + 2] = np.uint32(np.uint32(b >> np.uint32(16)) | np.uint32(c << np.uint32(16))) & mask
            out[4 * i + 3] = c >> np.uint32(8)
    else:
        for i in range(out.size):
            out[i] = join(values[3 * i], values[3 * i + 1], values[3 * i + 2])


@jit
def flip(source: Pixels, size: int, out: Pixels) -> None:
    """Mirror left to right."""
    for y in range(size):
        first, last = np.uint64(y * size), np.uint64(y * size + size - 1)
        for x in range(size):
            out[first + np.uint64(x)] = source[last - np.uint64(x)]


@jit
def join(red: Scalar, green: Scalar, blue: Scalar) -> Scalar:
    return np.uint32(red) | np.uint32(np.uint32(green) << np.uint32(8)) | np.uint32(np.uint32(blue) << np.uint32(16))


@jit
def channel(pixel: Scalar, c: int) -> Scalar:
    """Extract red, green or blue (``c`` = 0, 1, 2) from a pixel word."""
    return np.int32(np.uint32(pixel >> np.uint32(8 * c)) & np.uint32(255))


@jit
def luma(pixel: Scalar) -> Scalar:
    """Convert to L like Pillow: ITU-R 601 in 16-bit fixed point, rounded."""
    total = 19595 * channel(pixel, 0) + 38470 * channel(pixel, 1) + 7471 * channel(pixel, 2) + 0x8000
    return np.int32(np.uint32(total) >> np.uint32(16))


@jit
def blend(base: Scalar, value: Scalar, factor: Scalar) -> Scalar:
    """Compute Pillow's ImageBlend, base + factor * (value - base), clipped; float32.

    Pillow's shortcuts for factors 0 and 1, and its unclipped branch between them, give the same results.
    """
    mixed = base + factor * (value - base)
    return np.int32(min(max(mixed, np.float32(0)), np.float32(255)))


@jit
def blend_constant(source: Pixels, base: Scalar, factor: Scalar, out: Pixels) -> None:
    """Apply Brightness (base 0) or Contrast (base the mean luma)."""
    base, factor = np.float32(base), np.float32(factor)
    for i in range(source.size):
        p = source[i]
        out[i] = join(
            blend(base, np.float32(channel(p, 0)), factor),
            blend(base, np.float32(channel(p, 1)), factor),
            blend(base, np.float32(channel(p, 2)), factor),
        )


@jit
def color(source: Pixels, factor: Scalar, out: Pixels) -> None:
    """Blend with the grey version of the image."""
    factor = np.float32(factor)
    for i in range(source.size):
        p = source[i]
        grey = np.float32(luma(p))
        out[i] = join(
            blend(grey, np.float32(channel(p, 0)), factor),
            blend(grey, np.float32(channel(p, 1)), factor),
            blend(grey, np.float32(channel(p, 2)), factor),
        )


@jit
def grayscale(source: Pixels, out: Pixels) -> None:
    for i in range(source.size):
        grey = luma(source[i])
        out[i] = join(grey, grey, grey)


@jit
def mean_luma(source: Pixels) -> int:
    """Compute the grey level that Contrast blends with: mean L, rounded half up."""
    total = np.int64(0)
    for i in range(source.size):
        total += luma(source[i])
    return int(total / source.size + 0.5)


@jit
def shift_hue(source: Pixels, shift: Scalar, out: Pixels) -> None:
    """Add ``shift`` to H, modulo 256, in Pillow's 8-bit HSV, in one pass.

    Pillow goes through single and double precision. The shorter arithmetic here rounds to the same 8-bit values for
    all 2**24 colours, as the tests check.
    """
    shift = np.int32(shift)
    one, six = np.float32(1), np.float32(6)
    for i in range(source.size):
        p = source[i]
        red, green, blue = channel(p, 0), channel(p, 1), channel(p, 2)
        high, low = max(red, green, blue), min(red, green, blue)
        chroma = np.int32(high - low)
        if red == high:
            sector, ahead, behind = np.float32(0), blue, green
        elif green == high:
            sector, ahead, behind = np.float32(2), red, blue
        else:
            sector, ahead, behind = np.float32(4), green, red
        # sector + (high - ahead) / chroma - (high - behind) / chroma: one quotient is 1, so it is rounded only once
        middle = np.int32(np.int32(ahead + behind) - low)
        quotient = np.float32(np.int32(high - middle)) / np.float32(max(chroma, np.int32(1)))
        unit = one if chroma > 0 else np.float32(0)
        angle = (sector + unit) - quotient if ahead == low else (sector - unit) + quotient
        turn = angle / six
        turn = turn + one if turn < np.float32(0) else turn
        hue = np.int32(np.int32(turn * np.float32(255)) + shift) & np.int32(255)
        saturation = np.int32(np.float32(chroma) / np.float32(max(high, np.int32(1))) * np.float32(255))
        out[i] = _from_hsv(np.float32(np.int32(6) * hue), np.float32(saturation), np.float32(high))


@jit
def _from_hsv(turn: Scalar, saturation: Scalar, value: Scalar) -> Scalar:
    """Convert HSV to RGB; over a turn of 6 * 255 each channel follows a trapezium."""
    full, zero = np.float32(255), np.float32(0)
    red = np.float32(510) - abs(turn - np.float32(765))
    green = abs(turn - np.float32(510)) - full
    blue = abs(turn - np.float32(1020)) - full
    drop = value * saturation
    start = value * np.float32(65025) + np.float32(32512)
    # rounded value * (1 - saturation/255 * fall/255); all terms are integers below 2**24
    share = np.float32(1 / 65025)
    return join(
        np.int32((start - drop * max(min(red, full), zero)) * share),
        np.int32((start - drop * max(min(green, full), zero)) * share),
        np.int32((start - drop * max(min(blue, full), zero)) * share),
    )
