"""CLSA: a strong view is to be as similar to all keys as its weak view is.

Source: Wang & Qi 2022 ("Contrastive Learning with Stronger Augmentations"), their distributional divergence. The query
of view 0 has the distribution ``p = softmax(q . k / T)`` over its own key and the queue; a composite of the same image
has another, ``p'``. The loss is ``-sum_k p_k log p'_k``, averaged over images and composites, without gradient in
``p``. Both distributions have the method's temperature, as in the authors' code.

That code adds up several strong views of different sizes, made of 5 draws from the 14 augmentations each; here
composites have the lengths of ``--lengths``, and are averaged. Its distributions, and its InfoNCE, also cover the keys
of the batch's other images; here both are over the query's own key and the queue, as in MoCo. With ``--symmetric`` each
view is p once, over its own key.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from cocor.auxiliary.base import Auxiliary, composite_passes
from cocor.methods.base import Config, Method
from cocor.methods.moco import Logits, MoCo
from loaders.batch import Batch


class Queued(Auxiliary):
    """An auxiliary that contrasts further views, by default composites, with a queue."""

    needs = "queue of keys"

    @classmethod
    def fits(cls, method: type[Method]) -> bool:
        return issubclass(method, MoCo)

    @classmethod
    def cost(cls, config: Config) -> float:
        return composite_passes(config)


class CLSA(Queued):
    """Distributional divergence between a view and its composites over the queue."""

    options = ("auxiliary_weight",)
    composites = True
    by_length = True

    def loss(self, method: Method, batch: Batch, features: Sequence[Tensor]) -> Tensor:
        assert isinstance(method, MoCo)
        pairs = [
            pair for images in batch.composites for pair in zip(method.logits, method.contrast(images), strict=True)
        ]
        return torch.stack([divergence(weak, strong) for weak, strong in pairs]).mean()


def divergence(weak: Logits, strong: Logits) -> Tensor:
    """Average the cross-entropy of the distributions of two queries over 1 + K keys."""
    weak_logits, strong_logits = (torch.cat([own[:, None], queue], 1) for own, queue in (weak, strong))
    return -(weak_logits.softmax(1) * strong_logits.log_softmax(1)).sum(1).mean()
