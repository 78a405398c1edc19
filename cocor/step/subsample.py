"""Options that make steps cheaper and change the recipe: which part of its batches a step trains on.

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
class Turns:
    """What takes part in each step of a run with epochs of ``steps_per_epoch`` steps."""

    config: Config
    steps_per_epoch: int

    def __call__(self, batch: Batch, labelled: Batch | None, step: int) -> tuple[Batch, Batch | None]:
        """What step number ``step`` of the run trains on: ``batch`` with the composites whose turn it is, scaled to
        their size, and ``labelled`` if the MMNN learns in this step. Without options these are the same tensors."""
        places, size = self.places(step), self.config.composite_size
        if len(places) < len(batch.composites):
            composition = torch.stack([batch.composition[place] for place in places])
            batch = replace(batch, composites=_chosen(batch.composites, places), composition=composition)
        if len(batch.composites) and size and size != batch.composites.shape[-1]:
            batch = replace(batch, composites=scaled_down(batch.composites, size))
        return batch, labelled if self.guided(step) else None

    def places(self, step: int) -> list[int]:
        """The indices into ``config.lengths`` of the lengths that step number ``step`` trains on, in ascending order.

        Every length takes part in the same share of the steps. As a step's loss is the mean over its lengths, the mean
        gradient over a whole cycle is that of all lengths. Steps in which the MMNN learns rotate by themselves:
        otherwise it might never see some of the lengths, as with every second step and two lengths.
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
        """Steps after which the turns repeat, within an epoch."""
        count = len(self.config.lengths)
        return self.config.mmnn_every * count // math.gcd(count, self.config.lengths_per_step)


def guided_steps(config: Config, steps_per_epoch: int) -> int:
    """How many steps of an epoch have a labelled batch."""
    return -(-steps_per_epoch // config.mmnn_every)


def scaled_down(images: Tensor, size: int) -> Tensor:
    """Images (L, B, 3, H, W) at ``size`` x ``size`` pixels, antialiased and bilinear as crops are; channels-last."""
    lengths, count, channels = images.shape[:3]
    result = images.new_empty(lengths, count, size, size, channels).movedim(-1, 2)
    precise = torch.promote_types(images.dtype, torch.float32)  # on a CPU it does not work in bfloat16
    for small, large in zip(result, images, strict=True):
        small.copy_(F.interpolate(large.to(precise), (size, size), mode="bilinear", antialias=True))
    return result


def _chosen(images: Tensor, places: Sequence[int]) -> Tensor:
    """Rows ``places`` of (L, B, 3, H, W), still channels-last. Indexing would copy the indices to the device."""
    return torch.stack([images[place].movedim(1, -1) for place in places]).movedim(-1, 2)
