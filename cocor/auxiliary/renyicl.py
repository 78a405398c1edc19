"""RenyiCL: contrast composites by a skew Renyi divergence.

Source: Lee & Shin 2022 ("RenyiCL: Contrastive Representation Learning with Skew Renyi Divergence"), the variational
bound of the skew Renyi divergence of order gamma. With f the logits of positive (p) and negative (n) pairs,

    L = log(a E_p[exp(gamma f)] + (1 - a) E_n[exp(gamma f)]) / gamma - log(E_p[exp((gamma - 1) f)]) / (gamma - 1)

and ``-E_p[f]`` for the second term where gamma is 1. Its gradient is that of the authors' code, which weighs pairs by
``exp((gamma - 1) f)``: easy positives and hard negatives count most. As theirs, expectations cover the whole batch, all
ranks and all composites, which are the "harder augmentations"; gamma is 2.

Theirs replaces the loss of MoCo v3; here it is added to that of MoCo, whose key and queue make the pairs of a
composite, at the method's temperature. The skew a is 1 / K for a queue of K; theirs is 1 / 65,536, the size of MoCo's.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from cocor.auxiliary.clsa import Queued
from cocor.auxiliary.heads import log_mean_exp
from cocor.methods.base import Config, Method
from cocor.methods.moco import MoCo
from loaders.batch import Batch


class RenyiCL(Queued):
    """Skew Renyi contrast of composites with key and queue."""

    options = ("auxiliary_weight", "renyi_order")
    composites = True

    def __init__(self, config: Config, method: Method) -> None:
        super().__init__(config, method)
        self.order, self.skew = config.renyi_order, 1.0 / config.queue_size

    def loss(self, method: Method, batch: Batch, features: Sequence[Tensor]) -> Tensor:
        assert isinstance(method, MoCo)
        logits = [pair for images in batch.composites for pair in method.contrast(images)]
        positive, negative = (torch.stack(part) for part in zip(*logits, strict=True))
        every = [
            log_mean_exp(self.order * positive, method.ranks) + math.log(self.skew),
            log_mean_exp(self.order * negative, method.ranks) + math.log1p(-self.skew),
        ]
        contrast = torch.stack(every).logsumexp(0) / self.order
        if self.order == 1.0:
            return contrast - positive.mean()
        return contrast - log_mean_exp((self.order - 1.0) * positive, method.ranks) / (self.order - 1.0)
