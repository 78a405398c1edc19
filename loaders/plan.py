"""The view plan: everything random about a batch, drawn by a pure function of (seed, epoch, sample index).

A view is a crop plus a program. ``draw`` gives, for every sample, the crop boxes and flips, and for every view the list
of (op code, magnitude) to run on its crop, together with the composition vectors. Loaders and executors draw nothing
themselves: they are told which files, which boxes and which programs, so all of them show the same views.

    contrastive views   random resized crop + flip, then colour jitter, grey, blur, solarise (as programs)
    original            ``shared``: one random resized crop + flip, nothing else
                        ``weak``: several contrastive-style crops (the released code's recipe)
                        ``center``: the central crop of an evaluation
    composites          l draws with replacement from the pool, on the shared crop (paper) or on a contrastive-style
                        view of a crop of their own (released)
"""

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from loaders import ops
from loaders.errors import UserError
from loaders.jit import jit
from loaders.ops import END, Op
from loaders.philox import integer, uniform

Original = Literal["none", "shared", "weak", "center"]
Filter = Literal["bilinear", "bicubic"]

_VIEW_STREAM = 1 << 16  # crops use streams 0, 1, 2, ...; programs use these
_CROP_TRIES = 10
_FLIP_DRAW = 4 * _CROP_TRIES
_AUGMENTATION_LENGTH = 7  # colour jitter's four ops, Grayscale, GaussianBlur, Solarize


@dataclass(frozen=True)
class Augmentation:
    """How a contrastive view is made; the defaults are MoCo v2's. The order of the four jitter ops is random."""

    crop_scale: tuple[float, float] = (0.2, 1.0)
    brightness: float = 0.4
    contrast: float = 0.4
    saturation: float = 0.4
    hue: float = 0.1
    jitter_prob: float = 0.8
    grayscale_prob: float = 0.2
    blur_prob: float = 0.5
    blur_sigma: tuple[float, float] = (0.1, 2.0)
    solarize_prob: float = 0.0
    flip_prob: float = 0.5

    def row(self) -> list[float]:
        """The fields as one row of the table that the compiled draw reads (see ``_draw_augmentation``)."""
        jitter = [self.brightness, self.contrast, self.saturation, self.hue]
        return [*jitter, self.jitter_prob, self.grayscale_prob, self.blur_prob, *self.blur_sigma, self.solarize_prob]


@dataclass(frozen=True)
class ViewLayout:
    """How many views of each kind a sample has, in this order, and which crop each of the T views starts from."""

    contrastive: int
    originals: int
    composites: int
    crop_of_view: tuple[int, ...]

    @property
    def crops(self) -> int:
        return max(self.crop_of_view) + 1

    @property
    def views(self) -> int:
        return len(self.crop_of_view)


@dataclass(frozen=True)
class PlannedBatch:
    """What to make of B samples; C crops, T views, programs padded with ``END`` to P ops. Arrays are C-contiguous."""

    index: npt.NDArray[np.int64]  # (B,)
    boxes: npt.NDArray[np.int32]  # (B, C, 4) top, left, height, width in pixels of the upright image
    flips: npt.NDArray[np.uint8]  # (B, C) 1 = mirror left to right
    codes: npt.NDArray[np.uint8]  # (B, T, P)
    magnitudes: npt.NDArray[np.float32]  # (B, T, P)
    composition: npt.NDArray[np.uint8]  # (L, B, 14)


@dataclass(frozen=True)
class ViewPlan:
    """Draws the views of a data set. ``lengths`` are the composite lengths; empty makes none. ``filter``: how loaders
    resize crops, always antialiased; training is bilinear."""

    size: int = 224
    seed: int = 0
    contrastive: tuple[Augmentation, ...] = (Augmentation(), Augmentation())
    original: Original = "shared"
    originals: int = 1
    original_scale: tuple[float, float] = (0.2, 1.0)
    lengths: tuple[int, ...] = (1, 2, 3)
    pool: ops.Pool = "all"
    magnitudes: ops.Magnitudes = "uniform"
    order: ops.Order = "random"
    weak: Augmentation = field(default_factory=Augmentation)
    filter: Filter = "bilinear"

    def __post_init__(self) -> None:
        if self.size < 1 or any(length < 1 for length in self.lengths):
            raise UserError("image size and composite lengths must be positive")
        if self.lengths and self.original in ("none", "center"):
            raise UserError("composites need an original to be compared with")

    @cached_property
    def layout(self) -> ViewLayout:
        contrastive, count = list(range(len(self.contrastive))), len(self.contrastive)
        originals = 0 if self.original == "none" else self.originals if self.original == "weak" else 1
        original_crops = list(range(count, count + originals))
        if self.original == "weak":
            composite_crops = list(range(count + originals, count + originals + len(self.lengths)))
        else:
            composite_crops = original_crops * len(self.lengths)
        crops = (*contrastive, *original_crops, *composite_crops)
        return ViewLayout(count, originals, len(self.lengths), crops)

    @property
    def program_length(self) -> int:
        """P, the longest program that the plan can draw (at least 1)."""
        longest = max(self.lengths, default=0)
        if self.original == "weak":
            return _AUGMENTATION_LENGTH + longest
        return max(longest, _AUGMENTATION_LENGTH if self.contrastive else 1)

    def draw(
        self, epoch: int | npt.NDArray[np.int64], index: npt.NDArray[np.int64], sizes: npt.NDArray[np.int32]
    ) -> PlannedBatch:
        """Plan the samples ``index`` (B,) of upright ``sizes`` (B, 2) = (height, width) for ``epoch``, one or (B,)."""
        batch, layout = len(index), self.layout
        epochs = np.ascontiguousarray(np.broadcast_to(np.asarray(epoch, np.int64), batch))
        boxes = np.empty((batch, layout.crops, 4), np.int32)
        flips = np.empty((batch, layout.crops), np.uint8)
        codes = np.full((batch, layout.views, self.program_length), END, np.uint8)
        magnitudes = np.zeros((batch, layout.views, self.program_length), np.float32)
        composition = np.zeros((layout.composites, batch, len(ops.BASIC)), np.uint8)
        crop_rows, view_rows, lengths, pool, ranges, places = self._tables
        index = np.ascontiguousarray(index, np.int64)
        sizes = np.ascontiguousarray(sizes, np.int32)
        _draw_crops(self.seed, epochs, index, sizes, crop_rows, boxes, flips)
        _draw_programs(
            self.seed, epochs, index, view_rows, lengths, pool, ranges, places, layout.contrastive + layout.originals,
            codes, magnitudes, composition,
        )  # fmt: skip
        return PlannedBatch(index, boxes, flips, codes, magnitudes, composition)

    @cached_property
    def _tables(self) -> tuple[npt.NDArray[Any], ...]:
        """Arrays: crop rows (C, 4), view rows (T, 10), lengths, pool codes, ranges (14, 4), places in order (14,)."""
        layout, row_length = self.layout, len(self.weak.row())
        crop_rows = [[*a.crop_scale, a.flip_prob, 0.0] for a in self.contrastive]
        view_rows = [a.row() for a in self.contrastive]
        shared = [*self.original_scale, self.weak.flip_prob, 0.0]
        own = [*self.weak.crop_scale, self.weak.flip_prob, 0.0]
        if self.original == "weak":
            crop_rows += [own] * (layout.originals + layout.composites)
            view_rows += [self.weak.row()] * (layout.originals + layout.composites)
        else:
            crop_rows += [[0.0, 0.0, 0.0, 1.0] if self.original == "center" else shared] * layout.originals
            view_rows += [[0.0] * row_length] * (layout.originals + layout.composites)
        ranges = [ops.RANGES[self.magnitudes].get(op, (0.0, 0.0, False, False)) for op in ops.BASIC]
        return (
            np.array(crop_rows, np.float64).reshape(-1, 4),
            np.array(view_rows, np.float64).reshape(-1, row_length),
            np.array(self.lengths, np.int64),
            np.array([int(op) for op in ops.POOLS[self.pool]], np.uint8),
            np.array(ranges, np.float64),
            np.argsort(np.array(ops.ORDERS[self.order], np.int64))
            if ops.ORDERS[self.order]
            else np.zeros(len(ops.BASIC), np.int64),
        )


@jit
def _random_resized_crop(seed, epoch, index, stream, height, width, low, high, box):  # type: ignore[no-untyped-def]
    """torchvision's RandomResizedCrop box: area share in [low, high), aspect ratio log-uniform in [3/4, 4/3)."""
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
    """The square of 7/8 of the shorter side: what Resize(256) and CenterCrop(224) see."""
    side = max(1, round(min(height, width) * 0.875))
    box[0], box[1], box[2], box[3] = (height - side) // 2, (width - side) // 2, side, side


@jit
def _draw_crops(seed, epochs, index, sizes, rows, boxes, flips):  # type: ignore[no-untyped-def]
    """``rows`` (C, 4): lowest and highest area share, flip probability, 1 for a central crop."""
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
    """torchvision's ColorJitter: a factor in [max(0, 1 - strength), 1 + strength)."""
    low = max(0.0, 1.0 - strength)
    return low + (1.0 + strength - low) * draw


@jit
def _draw_augmentation(seed, epoch, index, stream, row, codes, magnitudes):  # type: ignore[no-untyped-def]
    """Write one contrastive-style program and return its length. ``row`` is ``Augmentation.row()``."""
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
    """A magnitude within ``limits`` = (low, high, integer, random sign)."""
    draw = uniform(seed, epoch, index, stream, number)
    value = math.floor(limits[0] + (limits[1] - limits[0] + 1.0) * draw) if limits[2] > 0 else (
        limits[0] + (limits[1] - limits[0]) * draw
    )  # fmt: skip
    if limits[3] > 0 and uniform(seed, epoch, index, stream, number + 1) < 0.5:
        value = -value
    return value


@jit
def _draw_programs(  # type: ignore[no-untyped-def]
    seed, epochs, index, rows, lengths, pool, ranges, places, first_composite, codes, magnitudes, composition
):
    """Programs of all views; composites append their draws to the (perhaps empty) augmentation of their row, sorted by
    the ``places`` (14,) of the operations; equal places leave the order in which they were drawn."""
    for b in range(len(index)):
        for t in range(len(rows)):
            stream = _VIEW_STREAM + t
            at = _draw_augmentation(seed, epochs[b], index[b], stream, rows[t], codes[b, t], magnitudes[b, t])
            if t < first_composite:
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
