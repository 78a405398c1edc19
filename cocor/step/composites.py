"""How composites pull on the encoder: similarities of a batch, their gradients, and the consistency loss.

    begin   embeddings, targets and similarities, length by length, each with its gradient
    finish  the consistency loss of all lengths together (``cocor.objective.consistency``)
    add     slope_l times the gradient of length l, on top of the contrastive gradient

The gradient of each length is kept by itself, because the exact hyper-gradient needs its inner product with the
cross-entropy's. The consistency loss then needs no backward pass of its own: its gradient is a linear combination.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from cocor.config.options import Config
from cocor.distributed.collectives import mean_over_ranks
from cocor.methods.base import Method
from cocor.objective.consistency import Consistency, abs_loss, latent_similarity, normalised, softplus_loss
from cocor.step.labelled_head import Timer
from cocor.step.streams import Streams
from loaders.batch import Batch


@dataclass
class Lengths:
    """The similarities of a batch, length by length."""

    target: Tensor  # (L, B) with the MMNN's graph
    originals: Tensor  # (B, d)
    gradients: list[Sequence[Tensor]]  # per length, one tensor per parameter, see Puller._gradients
    similarity: list[Tensor]  # per length (B,), detached


@dataclass
class Pull:
    """The consistency loss of a batch, and what the rest of the step needs."""

    consistency: Consistency
    target: Tensor  # as in Lengths
    originals: Tensor
    gradients: list[Sequence[Tensor]]
    similarity: Tensor  # (L, B) detached


class Puller:
    """Pulls ``parameters``, all that the encoder's optimiser steps, towards the similarities that ``target`` sets.

    ``autocast()`` is the context in which networks run; lengths run beside each other on ``streams``.
    """

    def __init__(
        self,
        config: Config,
        method: Method,
        target: nn.Module,
        parameters: Sequence[Tensor],
        *,
        autocast: Callable[[], AbstractContextManager[None]],
        streams: Streams,
    ) -> None:
        self._config, self._method, self._target, self._parameters = config, method, target, parameters
        self._autocast, self._streams = autocast, streams

    def begin(self, batch: Batch, timer: Timer) -> Lengths:
        """Similarities and their gradients. On streams of their own they may still be running when this returns."""
        with timer("original"):
            originals = self.originals(batch)
            target = self._target(batch.composition)
        lengths = Lengths(target, originals, [], [])
        for number, images in enumerate(batch.composites):
            with timer("composites"), self._streams.beside(number):
                with self._autocast():
                    embedding = self._method.embed_composite(images)
                similarity = latent_similarity(embedding[None], originals)[0]
                lengths.gradients.append(self._gradients(similarity, target[number], len(batch.composites)))
                lengths.similarity.append(similarity.detach())
        return lengths

    def finish(self, lengths: Lengths) -> Pull:
        """Wait for all lengths, and compute their consistency loss."""
        self._streams.join()
        similarity = torch.stack(lengths.similarity)
        consistency = self.consistency(similarity, lengths.target)
        return Pull(consistency, lengths.target, lengths.originals, lengths.gradients, similarity)

    def add(self, pull: Pull) -> dict[str, Tensor]:
        """Add the consistency gradient to the contrastive one in ``.grad``; returns the norms of both, on this rank."""
        weight = self._config.consistency_weight
        for parameter in self._parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        total = [parameter.grad for parameter in self._parameters if parameter.grad is not None]  # all of them
        slopes = [1.0] * len(pull.gradients) if self._config.consistency == "abs" else pull.consistency.slope
        added = torch._foreach_mul(list(pull.gradients[0]), weight * slopes[0])
        for number in range(1, len(pull.gradients)):
            torch._foreach_add_(added, torch._foreach_mul(list(pull.gradients[number]), weight * slopes[number]))
        norms = [torch.stack(torch._foreach_norm(gradients)).norm() for gradients in (total, added)]
        torch._foreach_add_(total, added)
        return {"gradient_contrastive": norms[0], "gradient_consistency": norms[1]}

    def originals(self, batch: Batch) -> Tensor:
        """(B, d): the embedding of the original, or the normalised mean over the recipe's several originals."""
        with self._autocast():
            embedding = self._method.embed_original(batch.original)
        return normalised(embedding.view(-1, len(batch.index), embedding.shape[1]).mean(0))

    def consistency(self, similarity: Tensor, target: Tensor) -> Consistency:
        """The consistency loss of ``similarity`` (L, B) with ``target`` (L, B)."""
        if self._config.consistency == "abs":
            return abs_loss(similarity, target, mean_over_ranks=mean_over_ranks)
        return softplus_loss(similarity, target, beta=self._config.consistency_beta, mean_over_ranks=mean_over_ranks)

    def _gradients(self, similarity: Tensor, target: Tensor, lengths: int) -> Sequence[Tensor]:
        """Parameter gradients of one length: of its mean similarity for softplus, of its loss for abs.

        The slope of the softplus loss depends on the mean alone, so :meth:`add` can multiply by it later; that of the
        abs loss differs between samples.
        """
        if self._config.consistency == "abs":
            output = abs_loss(similarity[None], target[None]).loss / lengths
        else:
            output = similarity.mean()
        return torch.autograd.grad(output, self._parameters, materialize_grads=True)
