"""Options that make steps cheaper and change the recipe: what of its batches a step trains on.

    --lengths-per-step N   N of the lengths of composites, in turn
    --composite-size S     composites scaled down to S x S pixels; the original and the contrastive views keep theirs
    --mmnn-every K         MMNN and classifier learn in the first step of each epoch and in every K-th after it

All are off by default. They follow from the number of the step alone, so that all ranks, and a run that resumes, choose
alike. Loaders make every composite at full size, which takes a GPU a thousandth of a step; a step leaves out here what
it does not train on.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from cocor.config import Config
from loaders.batch import Batch


@dataclass(frozen=True)
class Turns:
    """What takes part in each step of a run with epochs of ``steps_per_epoch`` steps."""

    config: Config
    steps_per_epoch: int

    def __call__(self, batch: Batch, labelled: Batch | None, step: int) -> tuple[Batch, Batch | None]:
        """What step number ``step`` of the run trains on: ``batch`` with the composites whose turn it is, at their
        size, and ``labelled`` if it is the MMNN's turn. The same tensors wherever no option is in use."""
        places, size = self.places(step), self.config.composite_size
        if len(places) < len(batch.composites):
            composition = torch.stack([batch.composition[place] for place in places])
            batch = replace(batch, composites=_chosen(batch.composites, places), composition=composition)
        if len(batch.composites) and size and size != batch.composites.shape[-1]:
            batch = replace(batch, composites=scaled_down(batch.composites, size))
        return batch, labelled if self.guided(step) else None

    def places(self, step: int) -> list[int]:
        """The places in ``config.lengths`` of those that step number ``step`` trains on, in ascending order.

        Every length takes part in the same share of the steps. As a step's loss is the mean over its lengths, the mean
        gradient over a whole turn is that of all lengths. Steps in which the MMNN learns have a turn of their own: it
        would never see some lengths if both turns kept step.
        """
        guided = step // self.steps_per_epoch * guided_steps(self.config, self.steps_per_epoch)
        guided += self.guided_before(step)
        turn = guided if self.guided(step) else step - guided
        count = len(self.config.lengths)
        taken = self.config.lengths_per_step or count
        return sorted((turn * taken + at) % count for at in range(taken))

    def guided(self, step: int) -> bool:
        """Whether step number ``step`` is one in which the MMNN learns, hence has a labelled batch."""
        return step % self.steps_per_epoch % self.config.mmnn_every == 0

    def guided_before(self, step: int) -> int:
        """How many steps of the same epoch before step number ``step`` of the run had a labelled batch."""
        return -(-(step % self.steps_per_epoch) // self.config.mmnn_every)

    @property
    def cycle(self) -> int:
        """Steps after which all turns begin again, within an epoch."""
        count = len(self.config.lengths)
        return self.config.mmnn_every * count // math.gcd(count, self.config.lengths_per_step)


def guided_steps(config: Config, steps_per_epoch: int) -> int:
    """How many steps of an epoch have a labelled batch."""
    return -(-steps_per_epoch // config.mmnn_every)


def scaled_down(images: Tensor, size: int) -> Tensor:
    """Images (L, B, 3, H, W) at ``size`` x ``size`` pixels, antialiased and bilinear as crops are; channels-last."""
    lengths, count, channels = images.shape[:3]
    result = images.new_empty(lengths, count, size, size, channels).movedim(-1, 2)
    precise = torch.promote_types(images.dtype, torch.float32)  # on a CPU there is no other
    for small, large in zip(result, images, strict=True):
        small.copy_(F.interpolate(large.to(precise), (size, size), mode="bilinear", antialias=True))
    return result


def _chosen(images: Tensor, places: Sequence[int]) -> Tensor:
    """Rows ``places`` of (L, B, 3, H, W), channels-last as before. An index would have to be sent to the device."""
    return torch.stack([images[place].movedim(1, -1) for place in places]).movedim(-1, 2)
