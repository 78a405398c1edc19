"""Lookup tables per channel, for operations on single values.

Brightness, Contrast (once its mean is known), Posterize, Solarize, AutoContrast and Equalize are functions of a single
8-bit value. Any chain of them is one (3, 256) uint8 table, exactly, and costs nothing until a pixel has to be written.
``table`` maps stored values to current ones; ``fill`` is what the black outside of a pending warp has become.
"""

import numpy as np
from numpy.typing import NDArray

from loaders.jit import jit
from loaders.kernels.pointwise import Pixels, Scalar, blend, channel, join

Table = NDArray[np.uint8]


@jit
def reset(table: Table) -> None:
    for c in range(3):
        for v in range(256):
            table[c, v] = v


@jit
def clear(counts: NDArray[np.uint32]) -> None:
    for c in range(3):
        for v in range(256):
            counts[c, v] = 0


@jit
def then_blend(table: Table, fill: Table, base: Scalar, factor: Scalar) -> None:
    """Compose with Brightness (base 0) or Contrast (base the mean luma)."""
    base, factor = np.float32(base), np.float32(factor)
    for c in range(3):
        for v in range(256):
            table[c, v] = blend(base, np.float32(table[c, v]), factor)
        fill[c] = blend(base, np.float32(fill[c]), factor)


@jit
def then_posterize(table: Table, fill: Table, mask: int) -> None:
    """Compose with Posterize: AND with ``mask``."""
    for c in range(3):
        for v in range(256):
            table[c, v] &= mask
        fill[c] &= mask


@jit
def then_solarize(table: Table, fill: Table, threshold: int) -> None:
    """Compose with Solarize: invert values at or above ``threshold``."""
    for c in range(3):
        for v in range(256):
            value = table[c, v]
            table[c, v] = value if value < threshold else 255 - value
        fill[c] = fill[c] if fill[c] < threshold else 255 - fill[c]


@jit
def then_auto_contrast(table: Table, counts: NDArray[np.uint32]) -> None:
    """Compose with Pillow's autocontrast(cutoff=0), in its double precision."""
    for c in range(3):
        low, high = 0, 255
        while low < 255 and counts[c, low] == 0:
            low += 1
        while high > 0 and counts[c, high] == 0:
            high -= 1
        if high > low:
            scale = 255.0 / (high - low)
            offset = -low * scale
            for v in range(256):
                table[c, v] = min(max(int(table[c, v] * scale + offset), 0), 255)


@jit
def then_equalize(table: Table, counts: NDArray[np.uint32]) -> None:
    """Compose with Pillow's equalize, in its integer arithmetic."""
    mapped = np.empty(256, np.uint8)
    for c in range(3):
        total, last = np.int64(0), np.int64(0)
        for v in range(256):
            if counts[c, v] > 0:
                last = np.int64(counts[c, v])
                total += last
        step = (total - last) // 255
        if step > 0:
            rank = step // 2
            for v in range(256):
                mapped[v] = min(rank // step, np.int64(255))
                rank += np.int64(counts[c, v])
            for v in range(256):
                table[c, v] = mapped[table[c, v]]


@jit
def histogram(source: Pixels, table: Table, partial: NDArray[np.uint32], counts: NDArray[np.uint32]) -> None:
    """Count current values (3, 256): stored ones, moved to where the table maps them.

    ``partial`` (4, 3, 256) is scratch: four interleaved histograms keep runs of equal pixels from waiting for a store.
    """
    for k in range(4):
        clear(partial[k])
    whole = source.size // 4 * 4
    for i in range(0, whole, 4):
        for k in range(4):
            p = source[i + k]
            for c in range(3):
                partial[k, c, channel(p, c)] += np.uint32(1)
    for i in range(whole, source.size):
        for c in range(3):
            partial[0, c, channel(source[i], c)] += np.uint32(1)
    clear(counts)
    for c in range(3):
        for v in range(256):
            counts[c, table[c, v]] += partial[0, c, v] + partial[1, c, v] + partial[2, c, v] + partial[3, c, v]


@jit
def extremes(source: Pixels, counts: NDArray[np.uint32]) -> None:
    """Mark each channel's least and largest value in ``counts``, for AutoContrast.

    Cheaper than ``histogram``; valid while the table is the identity, as a table need not be monotone.
    """
    most, none = np.int32(255), np.int32(0)
    low0, low1, low2, high0, high1, high2 = most, most, most, none, none, none
    for i in range(source.size):
        p = source[i]
        red, green, blue = channel(p, 0), channel(p, 1), channel(p, 2)
        low0, low1, low2 = min(low0, red), min(low1, green), min(low2, blue)
        high0, high1, high2 = max(high0, red), max(high1, green), max(high2, blue)
    clear(counts)
    counts[0, low0] = counts[1, low1] = counts[2, low2] = 1
    counts[0, high0] = counts[1, high1] = counts[2, high2] = 1


@jit
def apply(source: Pixels, table: Table, out: Pixels) -> None:
    """Bring the stored pixels up to date."""
    for i in range(source.size):
        p = source[i]
        out[i] = join(table[0, channel(p, 0)], table[1, channel(p, 1)], table[2, channel(p, 2)])
