"""STL: learn transformations from pairs of images, without their parameters.

Source: Yu et al. 2024 ("Self-supervised Transformation Learning for Equivariant Representations") and their code. A
small network makes the transformation's representation ``t = g(f(x), f(x'))`` of an original and its composite, and

    transformation   t of two images under the same transformation attract each other, all others repel; weight 0.1
    equivariance     a linear map ``W(t)``, whose weights a linear network makes of t, takes the embedding of x to that
                     of x', with the t of *other images* under the same transformation; NT-Xent, weight 1

both at temperature 0.2; the invariance term is the method's own loss. Choices:

- Theirs gives each transformation to two images. Here two images share one if their composition vectors are equal,
  whatever order and magnitudes; all that do in the global batch are positives (the loss of Khosla et al. 2020), and
  W gets the mean t of the others. A composite without such another counts as a negative only. With 256 images that is
  no composite of length 1 and every other of length 3.
- Their map acts on the backbone's features, which takes 128 D^2 weights (537 million for ResNet-50); here on the
  equivariant projector's 128 outputs.
- f of the original has a gradient too, as theirs.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from cocor.auxiliary.base import PairAuxiliary
from cocor.auxiliary.heads import nt_xent, perceptron
from cocor.methods.base import (
    Config,
    Method,
    Ranks,
    batch_statistics_only,
    feature_size,
    joined,
    normalised,
    precise,
)
from cocor.methods.supcon import supervised_contrastive
from loaders.batch import Batch

_HIDDEN, _DIM, _WEIGHT = 512, 128, 0.1


class STL(PairAuxiliary):
    """Transformation representations of pairs, and equivariance to them."""

    options = ("auxiliary_weight", "auxiliary_temperature")
    composites = True

    def __init__(self, config: Config, method: Method) -> None:
        super().__init__(config, method)
        width = feature_size(method.backbone)
        self.transformation = perceptron(2 * width, _DIM, _DIM)
        self.transformation_head = perceptron(_DIM, _DIM, _DIM)
        self.projector = perceptron(width, _HIDDEN, _DIM)
        self.weights = nn.Linear(_DIM, _DIM * _DIM, bias=False)

    def loss(self, method: Method, batch: Batch, features: Sequence[Tensor]) -> Tensor:
        with batch_statistics_only(method.backbone):
            original = method.backbone(batch.original)
            composites = torch.cat([method.backbone(images) for images in batch.composites])
        pairs = torch.cat([original.repeat(len(batch.composites), 1), composites], 1)
        t = self.transformation(pairs)
        source, target = self.projector(torch.cat(pairs.chunk(2, 1))).chunk(2)
        head = self.transformation_head(t)
        t, head, source, target = (joined(precise(part), self.ranks) for part in (t, head, source, target))
        with torch.autocast(t.device.type, enabled=False):
            return self._of_batch(t, head, source, target, self.ranks.gather(kinds_of(batch.composition)))

    def _of_batch(self, t: Tensor, head: Tensor, source: Tensor, target: Tensor, kinds: Tensor) -> Tensor:
        """Compute the loss of the global batch, with (N, d) of each and ``kinds`` (N,)."""
        others = (kinds[:, None] == kinds[None]) & ~torch.eye(len(kinds), dtype=torch.bool, device=kinds.device)
        there = others.to(t.dtype)
        mean = there @ t / there.sum(1, keepdim=True).clamp_min(1.0)
        moved = torch.bmm(self.weights(mean).view(-1, _DIM, _DIM), source[:, :, None])[:, :, 0]
        equivariance = nt_xent(target, moved, self.temperature, Ranks(), others.any(1))
        return equivariance + _WEIGHT * supervised_contrastive(normalised(head), kinds, self.temperature)


def kinds_of(composition: Tensor) -> Tensor:
    """Number composition vectors (L, B, 14) of up to 10 operations: int64 (L * B,)."""
    digits = 11 ** torch.arange(composition.shape[-1], device=composition.device)
    return (composition.flatten(0, 1).long() * digits).sum(1)
