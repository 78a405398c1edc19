"""The interface of a contrastive method, and the few helpers that methods share. Not a base trainer.

A step calls ``contrastive`` once, ``embed_original`` and ``embed_composite`` for the consistency loss, steps the
optimiser and calls ``after_step``. In each of these forward passes BatchNorm normalises with the pass's own batch
statistics; only ``contrastive`` updates the running statistics, which evaluation uses.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from cocor.objective.consistency import normalised

Gather = Callable[[Tensor], Tensor]


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, gather: Gather, rank: int, world: int) -> Tensor:
        ctx.rank, ctx.world = rank, world
        return gather(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return gradient.chunk(ctx.world)[ctx.rank] * ctx.world, None, None, None


def joined(tensor: Tensor, gather: Gather, rank: int, world: int) -> Tensor:
    """The ``tensor`` (B, ...) of all ranks, concatenated: (world * B, ...), differentiable in this rank's share.

    For losses of the global batch that every rank computes alike: this rank's gradient is that of the global loss times
    ``world``, so that averaging over ranks gives the global gradient. The backward pass needs no communication.
    """
    return tensor if world == 1 else _Joined.apply(tensor, gather, rank, world)


class Method(nn.Module):
    """An ``nn.Module`` whose ``state_dict`` is all that is needed to resume.

    ``backbone`` maps images (B, 3, H, W) to features (B, D). ``metrics`` holds detached scalars () of the last
    ``contrastive`` call on this rank: ``loss``, ``feature_std`` and more if the method has any.
    """

    backbone: nn.Module
    metrics: dict[str, Tensor]
    total_steps: int = 1  # of the run, for what a method schedules itself

    def contrastive(self, views: Tensor, labels: Tensor | None = None) -> Tensor:
        """The method's own loss of views (V, B, 3, H, W): a scalar with gradient. Updates running statistics.

        ``labels`` (B,) int64 are for supervised methods; others ignore them.
        """
        raise NotImplementedError

    def reevaluate(self, views: Tensor, labels: Tensor | None = None) -> Tensor:
        """The loss of the same batch at the current weights, without gradient and without any change of state.

        For use between ``contrastive`` and ``after_step``; MoCo's keys and queue are those of ``contrastive``.
        """
        raise NotImplementedError

    def embed_original(self, images: Tensor) -> Tensor:
        """Originals (N, 3, H, W) -> normalised embeddings (N, d) float32 without gradient."""
        raise NotImplementedError

    def embed_composite(self, images: Tensor) -> Tensor:
        """Composites (N, 3, H, W) -> normalised embeddings (N, d) float32 with gradient."""
        raise NotImplementedError

    def after_step(self) -> None:
        """Update moving averages and queues; called once per step, after the optimiser."""
        raise NotImplementedError

    def parameter_groups(self, weight_decay: float) -> list[dict[str, Any]]:
        """Parameter groups for the optimiser; those with ``fixed_lr`` stay at the base learning rate."""
        raise NotImplementedError


@contextmanager
def batch_statistics_only(module: nn.Module) -> Iterator[None]:
    """Within the block BatchNorm in training mode does not update its running statistics.

    Also holds for synchronised BatchNorm and timm's variants. In evaluation mode nothing changes: they normalise with
    their running statistics, as outside of the block.
    """
    tracking = [m for m in module.modules() if isinstance(m, _BatchNorm) and m.track_running_stats]
    for norm in tracking:
        norm.track_running_stats = False
    try:
        yield
    finally:
        for norm in tracking:
            norm.track_running_stats = True


def feature_size(backbone: nn.Module) -> int:
    """Width D of the features that a timm model without classifier returns."""
    return int(getattr(backbone, "head_hidden_size", None) or backbone.num_features)  # type: ignore[arg-type]


def feature_std(features: Tensor) -> Tensor:
    """Standard deviation over the batch of l2-normalised features (B, d), averaged over d, times sqrt(d): ().

    About 1 for features that are spread over the sphere, 0 if all have collapsed to one point.
    """
    features = normalised(features.detach())
    return features.std(0, correction=0).mean() * features.shape[1] ** 0.5
