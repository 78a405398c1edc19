"""Draws of a view plan, compiled: pure functions of (seed, epoch, sample, view).

:class:`loaders.views.plan.ViewPlan` says in tables what to draw from; each draw has a number of its own in the stream
of its crop or view (:mod:`loaders.views.philox`), so that none depends on how many were made before.
"""

import math

from loaders.jit import jit
from loaders.views.ops import Op
from loaders.views.philox import integer, uniform

AUGMENTATION_LENGTH = 7
"""The longest contrastive-style program: colour jitter's four ops, Grayscale, GaussianBlur, Solarize."""

_VIEW_STREAM = 1 << 16  # crops use streams 0, 1, 2, ...; programs use these
_CROP_TRIES = 10
_FLIP_DRAW = 4 * _CROP_TRIES


@jit
def _random_resized_crop(seed, epoch, index, stream, height, width, low, high, box):  # type: ignore[no-untyped-def]
    """Draw torchvision's RandomResizedCrop box of an area share in [low, high).

    Its aspect ratio is log-uniform in [3/4, 4/3).
    """
    log_low, log_high = math.log(3.0 / 4.0), math.log(4.0 / 3.0)
    for attempt in range(_CROP_TRIES):
        number = 4 * attempt
        area = height * width * (low + (high - low) * uniform(seed, epoch, index, stream, number))
        log_ratio = log_low + (log_high - log_low) * uniform(seed, epoch, index, stream, number + 1)
        ratio = math.exp(log_ratio)
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            box[0] = integer(seed, epoch, index, stream, number + 2, height - h + 1)
            box[1] = integer(seed, epoch, index, stream, number + 3, width - w + 1)
            box[2], box[3] = h, w
            return
    # No box fits a very long image: take the central one of the nearest allowed aspect ratio.
    w, h = width, height
    if width < height * 0.75:
        h = max(1, round(width / 0.75))
    elif width > height * 4.0 / 3.0:
        w = max(1, round(height * 4.0 / 3.0))
    box[0], box[1], box[2], box[3] = (height - h) // 2, (width - w) // 2, h, w


@jit
def _central_crop(height, width, box):  # type: ignore[no-untyped-def]
    """Return the square of 7/8 of the shorter side: Resize(256), then CenterCrop(224)."""
    side = max(1, round(min(height, width) * 0.875))
    box[0], box[1], box[2], box[3] = (height - side) // 2, (width - side) // 2, side, side


@jit
def draw_crops(seed, epochs, index, sizes, rows, boxes, flips):  # type: ignore[no-untyped-def]
    """Write ``boxes`` (B, C, 4) and ``flips`` (B, C) of samples ``index`` (B,).

    ``rows`` (C, 4): lowest and highest area share, flip probability, 1 for a central crop.
    """
    for b in range(len(index)):
        height, width = int(sizes[b, 0]), int(sizes[b, 1])
        for c in range(len(rows)):
            if rows[c, 3] > 0:
                _central_crop(height, width, boxes[b, c])
            else:
                _random_resized_crop(seed, epochs[b], index[b], c, height, width, rows[c, 0], rows[c, 1], boxes[b, c])
            flips[b, c] = uniform(seed, epochs[b], index[b], c, _FLIP_DRAW) < rows[c, 2]


@jit
def _jitter_factor(strength, draw):  # type: ignore[no-untyped-def]
    """Draw torchvision's ColorJitter factor in [max(0, 1 - strength), 1 + strength)."""
    low = max(0.0, 1.0 - strength)
    return low + (1.0 + strength - low) * draw


@jit
def _draw_augmentation(seed, epoch, index, stream, row, codes, magnitudes):  # type: ignore[no-untyped-def]
    """Write one contrastive-style program and return its length. ``row``: see
    :meth:`loaders.views.plan.Augmentation.row`."""
    length = 0
    if uniform(seed, epoch, index, stream, 0) < row[4]:
        order = [0, 1, 2, 3]
        for i in range(3, 0, -1):  # Fisher-Yates
            j = integer(seed, epoch, index, stream, i, i + 1)
            order[i], order[j] = order[j], order[i]
        for op in order:
            draw = uniform(seed, epoch, index, stream, 4 + op)
            if row[op] <= 0.0:
                continue
            if op == 3:
                codes[length], magnitudes[length] = Op.HUE.value, row[3] * (2.0 * draw - 1.0)
            else:
                magnitudes[length] = _jitter_factor(row[op], draw)
                if op == 0:
                    codes[length] = Op.BRIGHTNESS.value
                elif op == 1:
                    codes[length] = Op.CONTRAST.value
                else:
                    codes[length] = Op.COLOR.value
            length += 1
    if uniform(seed, epoch, index, stream, 8) < row[5]:
        codes[length] = Op.GRAYSCALE.value
        length += 1
    if uniform(seed, epoch, index, stream, 9) < row[6]:
        codes[length] = Op.GAUSSIAN_BLUR.value
        magnitudes[length] = row[7] + (row[8] - row[7]) * uniform(seed, epoch, index, stream, 10)
        length += 1
    if uniform(seed, epoch, index, stream, 11) < row[9]:
        codes[length], magnitudes[length] = Op.SOLARIZE.value, 128.0
        length += 1
    return length


@jit
def _draw_magnitude(seed, epoch, index, stream, number, limits):  # type: ignore[no-untyped-def]
    """Draw a magnitude within ``limits`` = (low, high, integer, random sign)."""
    draw = uniform(seed, epoch, index, stream, number)
    value = math.floor(limits[0] + (limits[1] - limits[0] + 1.0) * draw) if limits[2] > 0 else (
        limits[0] + (limits[1] - limits[0]) * draw
    )  # fmt: skip
    if limits[3] > 0 and uniform(seed, epoch, index, stream, number + 1) < 0.5:
        value = -value
    return value


@jit
def draw_programs(  # type: ignore[no-untyped-def]
    seed, epochs, index, rows, streams, lengths, pool, ranges, places, first_composite, codes, magnitudes, composition
):
    """Write ``codes`` and ``magnitudes`` (B, T, P), and ``composition`` (L, B, 14).

    Composites append their draws to the (perhaps empty) augmentation of their row, sorted by the ``places`` (14,) of
    the operations; equal places leave the order in which they were drawn.
    """
    for b in range(len(index)):
        for t in range(len(rows)):
            stream = _VIEW_STREAM + streams[t]
            at = _draw_augmentation(seed, epochs[b], index[b], stream, rows[t], codes[b, t], magnitudes[b, t])
            if t < first_composite or t >= first_composite + len(lengths):
                continue
            for i in range(lengths[t - first_composite]):
                number = 16 + 3 * i
                op = pool[integer(seed, epochs[b], index[b], stream, number, len(pool))]
                codes[b, t, at] = op
                magnitudes[b, t, at] = _draw_magnitude(seed, epochs[b], index[b], stream, number + 1, ranges[op])
                composition[t - first_composite, b, op] += 1
                at += 1
            _sort(codes[b, t], magnitudes[b, t], at - lengths[t - first_composite], at, places)


@jit
def _sort(codes, magnitudes, first, end, places):  # type: ignore[no-untyped-def]
    """Put codes[first:end] with their magnitudes in the order of ``places``; stable."""
    for i in range(first + 1, end):
        code, magnitude, j = codes[i], magnitudes[i], i
        while j > first and places[codes[j - 1]] > places[code]:
            codes[j], magnitudes[j] = codes[j - 1], magnitudes[j - 1]
            j -= 1
        codes[j], magnitudes[j] = code, magnitude
