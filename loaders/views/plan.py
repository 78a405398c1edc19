"""View plan: all that is random about a batch, by (seed, epoch, index) alone.

A view is a crop plus a program. ``draw`` gives, for every sample, the crop boxes and flips, and for every view the list
of (op code, magnitude) to run on its crop, together with the composition vectors. Loaders and executors draw nothing
themselves: files, boxes and programs come from here, so all of them show the same views.

    contrastive views   random resized crop + flip, then colour jitter, grey, blur, solarise (as programs)
    original            ``shared``: one random resized crop + flip, nothing else
                        ``weak``: several contrastive-style crops (the released code's recipe)
                        ``center``: the central crop of an evaluation
    composites          l draws with replacement from the pool, on the shared crop (paper) or on a contrastive-style
                        view of a crop of their own (released)
    kept                further contrastive views, each with one part of the first one: its ``crop``, flip included, or
                        its ``color``, the whole program
"""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from loaders.errors import UserError
from loaders.views import ops
from loaders.views.draw import AUGMENTATION_LENGTH, draw_crops, draw_programs
from loaders.views.ops import END

Original = Literal["none", "shared", "weak", "center"]
Filter = Literal["bilinear", "bicubic"]
Kept = Literal["crop", "color"]


@dataclass(frozen=True)
class Augmentation:
    """Settings of a contrastive view, by default MoCo v2's; jitter is in random order."""

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
        """Return the fields as a row of the table that the compiled draw reads."""
        jitter = [self.brightness, self.contrast, self.saturation, self.hue]
        return [*jitter, self.jitter_prob, self.grayscale_prob, self.blur_prob, *self.blur_sigma, self.solarize_prob]


@dataclass(frozen=True)
class ViewLayout:
    """Counts of a sample's views by kind, in this order, and the crop of each view."""

    contrastive: int
    originals: int
    composites: int
    crop_of_view: tuple[int, ...]
    kept: int = 0

    @property
    def crops(self) -> int:
        """Return C, the number of crops of a sample."""
        return max(self.crop_of_view) + 1

    @property
    def views(self) -> int:
        """Return T, the number of views of a sample."""
        return len(self.crop_of_view)


@dataclass(frozen=True)
class PlannedBatch:
    """Plan of B samples: C crops, T views, programs padded with ``END`` to P ops."""

    index: npt.NDArray[np.int64]  # (B,)
    boxes: npt.NDArray[np.int32]  # (B, C, 4) top, left, height, width in pixels of the upright image
    flips: npt.NDArray[np.uint8]  # (B, C) 1 = mirror left to right
    codes: npt.NDArray[np.uint8]  # (B, T, P)
    magnitudes: npt.NDArray[np.float32]  # (B, T, P)
    composition: npt.NDArray[np.uint8]  # (L, B, 14)


@dataclass(frozen=True)
class ViewPlan:
    """Recipe of a data set's views, which it draws.

    ``lengths`` of composites may be empty. ``filter``: how loaders resize crops, antialiased; training is bilinear.
    ``parameters``: whether batches describe their contrastive views (:mod:`loaders.views.parameters`).
    """

    size: int = 224
    seed: int = 0
    contrastive: tuple[Augmentation, ...] = (Augmentation(), Augmentation())
    original: Original = "shared"
    originals: int = 1
    original_scale: tuple[float, float] = (0.2, 1.0)
    lengths: tuple[int, ...] = (1, 2, 3)
    pool: str = "all"
    magnitudes: ops.Magnitudes = "uniform"
    order: ops.Order = "random"
    weak: Augmentation = field(default_factory=Augmentation)
    filter: Filter = "bilinear"
    parameters: bool = False
    kept: tuple[Kept, ...] = ()

    def __post_init__(self) -> None:
        if self.size < 1 or any(length < 1 for length in self.lengths):
            raise UserError("image size and composite lengths must be positive")
        if self.lengths and self.original in ("none", "center"):
            raise UserError("composites need an original to be compared with")
        drawn = ops.POOLS.get(self.pool, ())
        if not drawn or not set(drawn) <= set(ops.BASIC):
            raise UserError(f"pool {self.pool}: unknown, empty, or not of basic augmentations only")

    @cached_property
    def layout(self) -> ViewLayout:
        """Lay out the views of a sample and the crops that they share."""
        contrastive, count = list(range(len(self.contrastive))), len(self.contrastive)
        originals = 0 if self.original == "none" else self.originals if self.original == "weak" else 1
        original_crops = list(range(count, count + originals))
        if self.original == "weak":
            composite_crops = list(range(count + originals, count + originals + len(self.lengths)))
        else:
            composite_crops = original_crops * len(self.lengths)
        crops = [*contrastive, *original_crops, *composite_crops]
        for part in self.kept:
            crops.append(0 if part == "crop" else max(crops) + 1)
        return ViewLayout(count, originals, len(self.lengths), tuple(crops), len(self.kept))

    @property
    def program_length(self) -> int:
        """Return P, the length of the longest program that the plan can draw."""
        longest = max(self.lengths, default=0)
        if self.original == "weak":
            return AUGMENTATION_LENGTH + longest
        return max(longest, AUGMENTATION_LENGTH if self.contrastive else 1)

    def draw(
        self, epoch: int | npt.NDArray[np.int64], index: npt.NDArray[np.int64], sizes: npt.NDArray[np.int32]
    ) -> PlannedBatch:
        """Plan samples ``index`` (B,) of ``sizes`` (B, 2) for ``epoch``, one or (B,)."""
        batch, layout = len(index), self.layout
        epochs = np.ascontiguousarray(np.broadcast_to(np.asarray(epoch, np.int64), batch))
        boxes = np.empty((batch, layout.crops, 4), np.int32)
        flips = np.empty((batch, layout.crops), np.uint8)
        codes = np.full((batch, layout.views, self.program_length), END, np.uint8)
        magnitudes = np.zeros((batch, layout.views, self.program_length), np.float32)
        composition = np.zeros((layout.composites, batch, len(ops.BASIC)), np.uint8)
        crop_rows, view_rows, streams, lengths, pool, ranges, places = self._tables
        index = np.ascontiguousarray(index, np.int64)
        sizes = np.ascontiguousarray(sizes, np.int32)
        draw_crops(self.seed, epochs, index, sizes, crop_rows, boxes, flips)
        draw_programs(
            self.seed, epochs, index, view_rows, streams, lengths, pool, ranges, places,
            layout.contrastive + layout.originals, codes, magnitudes, composition,
        )  # fmt: skip
        return PlannedBatch(index, boxes, flips, codes, magnitudes, composition)

    @cached_property
    def _tables(self) -> tuple[npt.NDArray[Any], ...]:
        """Build crop rows (C, 4), view rows (T, 10), streams (T,), lengths, pool, ranges, places."""
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
        # Behind all others, so that these are drawn as without them. A stream of draws is named by a view's place.
        streams = [
            *range(len(view_rows)),
            *(0 if p == "color" else len(view_rows) + n for n, p in enumerate(self.kept)),
        ]
        crop_rows += crop_rows[:1] * self.kept.count("color")
        view_rows += view_rows[:1] * len(self.kept)
        ranges = [ops.RANGES[self.magnitudes].get(op, (0.0, 0.0, False, False)) for op in ops.BASIC]
        pool, order = np.array(ops.POOLS[self.pool], np.uint8), np.array(ops.ORDERS[self.order], np.int64)
        places = np.argsort(order) if len(order) else np.zeros(len(ops.BASIC), np.int64)
        crops, views = np.array(crop_rows, np.float64), np.array(view_rows, np.float64)
        lengths = np.array(self.lengths, np.int64)
        drawn = crops.reshape(-1, 4), views.reshape(-1, row_length), np.array(streams, np.int64)
        return *drawn, lengths, pool, np.array(ranges), places
