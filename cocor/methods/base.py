"""What the trainer asks of a contrastive method, and the few helpers that methods share. Not a base trainer.

A step calls ``contrastive`` once, ``embed_original`` and ``embed_composite`` for the consistency loss, steps the
optimiser and calls ``after_step``. Every one of these forward passes normalises with its own batch statistics; only
``contrastive`` moves the running statistics of BatchNorm, which evaluation then uses.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from cocor.consistency import normalised

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
    """All ranks' ``tensor`` (B, ...) as (world * B, ...), with the gradient of this rank's share.

    For losses of the whole global batch, which every rank computes alike: the gradient is the global loss's, times
    ``world``, so that averaging over ranks completes it. Nothing travels in the backward pass.
    """
    return tensor if world == 1 else _Joined.apply(tensor, gather, rank, world)


class Method(nn.Module):
    """The interface of a method: an ``nn.Module`` whose ``state_dict`` is complete, so that training can resume.

    ``backbone`` maps images (B, 3, H, W) to features (B, D). ``metrics`` holds detached tensors of the last
    ``contrastive`` call, local to the rank: ``loss``, ``feature_std`` and what else the method knows.
    """

    backbone: nn.Module
    metrics: dict[str, Tensor]
    total_steps: int = 1  # of the run, for what a method schedules itself

    def contrastive(self, views: Tensor, labels: Tensor | None = None) -> Tensor:
        """The method's own loss of views (V, B, 3, H, W), a scalar with gradient. Moves running statistics.

        ``labels`` (B,) int64 are for supervised methods; the others do not look at them.
        """
        raise NotImplementedError

    def reevaluate(self, views: Tensor, labels: Tensor | None = None) -> Tensor:
        """The loss of the same batch at the present weights, without gradient and without any change of state.

        For use between ``contrastive`` and ``after_step``; what depends on the batch alone (keys, queue) stays.
        """
        raise NotImplementedError

    def embed_original(self, images: Tensor) -> Tensor:
        """Originals (N, 3, H, W) -> normalised embeddings (N, d) float32 without gradient."""
        raise NotImplementedError

    def embed_composite(self, images: Tensor) -> Tensor:
        """Composites (N, 3, H, W) -> normalised embeddings (N, d) float32 with gradient."""
        raise NotImplementedError

    def after_step(self) -> None:
        """What follows the optimiser's step, once a step: moving averages, queues."""
        raise NotImplementedError

    def parameter_groups(self, weight_decay: float) -> list[dict[str, Any]]:
        """Groups for the optimiser. ``fixed_lr`` tells which of them stay at the base learning rate."""
        raise NotImplementedError


@contextmanager
def batch_statistics_only(module: nn.Module) -> Iterator[None]:
    """Let BatchNorm in training mode normalise with batch statistics and leave its running statistics alone.

    Also holds for synchronised BatchNorm and timm's variants. Modules in evaluation mode must stay out of it.
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
    """Standard deviation of l2-normalised features (B, d) over the batch, mean over d, times sqrt(d).

    About 1 for features spread over the sphere, 0 when all of them have collapsed to one point.
    """
    features = normalised(features.detach())
    return features.std(0, correction=0).mean() * features.shape[1] ** 0.5
