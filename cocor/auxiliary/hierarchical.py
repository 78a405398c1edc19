"""Hierarchical invariance: deeper stages learn to ignore more augmentations.

Source: Zhang & Ma 2022 ("Rethinking the Augmentation Module in Contrastive Learning"), of which no code is published.
Theirs makes a pair of views for each of four stages of the backbone, by crop and jitter at the first, with grey, blur
and flip added one by one at the deeper ones; the contrastive losses of the stages are summed. A small network embeds
the parameters of a view's augmentations. Features are expanded by that before their projection head, so that they may
keep what the augmentations have changed. What is left open, and what composites suggest:

- The pairs are the original with the composite of each length, the shortest at the shallowest of as many last stages of
  the backbone, and the longest at the last one. So stages differ in how many augmentations they ignore, not in which.
- A stage's features are averaged over the image. The parameters are the composition vector, which is zero for the
  original. Heads have two layers, as MoCo's, and the embedding's network too.
- The loss is NT-Xent at temperature 0.2 over the global batch, averaged over the stages instead of summed, with weight
  1, beside the method's own loss.

A composite passes through the backbone up to its own stage only. These passes are not compiled.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from cocor.auxiliary.base import PairAuxiliary
from cocor.auxiliary.heads import nt_xent, perceptron
from cocor.methods.base import Config, Method, batch_statistics_only
from loaders.batch import Batch
from loaders.errors import UserError
from loaders.views.ops import BASIC

_HIDDEN, _DIM, _AUGMENTATION = 512, 128, 64


class Hierarchical(PairAuxiliary):
    """Contrast of original and composites at stages of the backbone, by length."""

    options = ("auxiliary_weight", "auxiliary_temperature")
    composites = True

    def __init__(self, config: Config, method: Method) -> None:
        super().__init__(config, method)
        info: Any = getattr(method.backbone, "feature_info", ())
        if len(info) < len(config.lengths) or not hasattr(method.backbone, "forward_intermediates"):
            raise UserError(
                f"--backbone {config.backbone}: has {len(info)} stages for timm, hierarchical needs one for each of "
                f"the {len(config.lengths)} in --lengths"
            )
        first = len(info) - len(config.lengths)
        self.stages = [first + sorted(config.lengths).index(length) for length in config.lengths]
        self.augmentation = perceptron(len(BASIC), _AUGMENTATION, _AUGMENTATION)
        widths = [info[stage]["num_chs"] + _AUGMENTATION for stage in self.stages]
        self.heads = nn.ModuleList(perceptron(width, _HIDDEN, _DIM) for width in widths)

    @classmethod
    def check(cls, config: Config) -> None:
        super().check(config)
        if config.lengths_per_step not in (0, len(config.lengths)):
            raise UserError("lengths_per_step: hierarchical needs all lengths in every step; leave it at 0")

    def loss(self, method: Method, batch: Batch, features: Sequence[Tensor]) -> Tensor:
        with batch_statistics_only(method.backbone):
            originals = _pooled(method.backbone, batch.original, sorted(self.stages))
            composites = [
                _pooled(method.backbone, images, [stage])[0]
                for images, stage in zip(batch.composites, self.stages, strict=True)
            ]
        counts = torch.cat([torch.zeros_like(batch.composition[:1]), batch.composition]).to(composites[0].dtype)
        plain, *augmented = self.augmentation(counts.flatten(0, 1)).chunk(len(counts))
        losses = []
        for stage, head, composite, embedding in zip(self.stages, self.heads, composites, augmented, strict=True):
            original = torch.cat([originals[stage - min(self.stages)], plain], 1)
            first, second = head(torch.cat([original, torch.cat([composite, embedding], 1)])).chunk(2)
            losses.append(nt_xent(first, second, self.temperature, self.ranks))
        return torch.stack(losses).mean()


def _pooled(backbone: Any, images: Tensor, stages: Sequence[int]) -> list[Tensor]:
    """Return the features of ``stages``, averaged over the image: (B, C) each."""
    maps = backbone.forward_intermediates(images, indices=list(stages), stop_early=True, intermediates_only=True)
    return [one.mean((2, 3)) for one in maps]
