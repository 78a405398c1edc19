"""Choose the part of its batches that a step trains on, to make it cheaper.

    --lengths-per-step N   N of the lengths of composites, in turn
    --composite-size S     composites scaled down to S x S pixels; the original and the contrastive views keep theirs
    --mmnn-every K         MMNN and classifier learn in the first step of each epoch and in every K-th after it

All are off by default. The choice depends on the number of the step alone, so that it is the same on all ranks and
after a resume. Loaders make every composite at full size, which takes a GPU a thousandth of a step; here a step drops
what it does not train on.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from cocor.config.options import Config
from loaders.batch import Batch


@dataclass(frozen=True)
class StepSchedule:
    """What takes part in each step of a run with epochs of ``steps_per_epoch`` steps."""

    config: Config
    steps_per_epoch: int

    def __call__(self, batch: Batch, labelled: Batch | None, step: int) -> tuple[Batch, Batch | None]:
        """Choose what step number ``step`` trains on; without options, all of it.

        Returns ``batch`` with the composites whose turn it is, scaled to their size, and ``labelled`` if the MMNN
        learns in this step.
        """
        places, size = self.places(step), self.config.composite_size
        if len(places) < len(batch.composites):
            composition = torch.stack([batch.composition[place] for place in places])
            batch = replace(batch, composites=_chosen(batch.composites, places), composition=composition)
        if len(batch.composites) and size and size != batch.composites.shape[-1]:
            batch = replace(batch, composites=scaled_down(batch.composites, size))
        return batch, labelled if self.has_labelled(step) else None

    def places(self, step: int) -> list[int]:
        """Return the indices into ``config.lengths`` that step ``step`` trains on.

        Every length takes part in the same share of the steps. As a step's loss is the mean over its lengths, the mean
        gradient over a whole cycle is that of all lengths.
        """
        # Steps in which the MMNN learns rotate by themselves: otherwise it might never see some of the lengths, as with
        # every second step and two lengths.
        labelled = step // self.steps_per_epoch * labelled_steps(self.config, self.steps_per_epoch)
        labelled += self.labelled_before(step)
        turn = labelled if self.has_labelled(step) else step - labelled
        count = len(self.config.lengths)
        taken = self.config.lengths_per_step or count
        return sorted((turn * taken + at) % count for at in range(taken))

    def has_labelled(self, step: int) -> bool:
        """Tell whether the MMNN learns in step ``step``, from a labelled batch."""
        return step % self.steps_per_epoch % self.config.mmnn_every == 0

    def labelled_before(self, step: int) -> int:
        """Count the earlier steps of the same epoch that had a labelled batch."""
        return -(-(step % self.steps_per_epoch) // self.config.mmnn_every)

    @property
    def cycle(self) -> int:
        """Count the steps after which the choice repeats, within an epoch."""
        count = len(self.config.lengths)
        return self.config.mmnn_every * count // math.gcd(count, self.config.lengths_per_step)


def split(batch: Batch, parts: int) -> list[Batch]:
    """Cut a batch into equal parts, for ``--accumulate``."""
    count = len(batch.index) // parts
    if parts == 1:
        return [batch]
    original = batch.original.unflatten(0, (-1, len(batch.index))) if len(batch.original) else batch.original[None]
    cuts = [slice(at * count, (at + 1) * count) for at in range(parts)]
    return [
        Batch(
            batch.views[:, cut], original[:, cut].flatten(0, 1), batch.composites[:, cut], batch.composition[:, cut],
            batch.label[cut], batch.index[cut],
        )
        for cut in cuts
    ]  # fmt: skip


def lengths_of(batch: Batch) -> list[Batch]:
    """Cut a batch into one with the composites of each length, its views with each."""
    pairs = zip(batch.composites.split(1), batch.composition.split(1), strict=True)
    return [replace(batch, composites=images, composition=counts) for images, counts in pairs]


def labelled_steps(config: Config, steps_per_epoch: int) -> int:
    """Count the steps of an epoch that have a labelled batch."""
    return -(-steps_per_epoch // config.mmnn_every)


def scaled_down(images: Tensor, size: int) -> Tensor:
    """Resize (L, B, C, H, W) to ``size`` pixels a side, antialiased; channels-last."""
    lengths, count, channels = images.shape[:3]
    result = images.new_empty(lengths, count, size, size, channels).movedim(-1, 2)
    precise = torch.promote_types(images.dtype, torch.float32)  # on a CPU it does not work in bfloat16
    for small, large in zip(result, images, strict=True):
        small.copy_(F.interpolate(large.to(precise), (size, size), mode="bilinear", antialias=True))
    return result


def _chosen(images: Tensor, places: Sequence[int]) -> Tensor:
    """Select rows ``places`` of (L, B, C, H, W), still channels-last."""
    # Indexing would copy the indices to the device.
    return torch.stack([images[place].movedim(1, -1) for place in places]).movedim(-1, 2)
