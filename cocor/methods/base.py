"""Define the interface of a contrastive method, and what several methods share.

A step calls ``contrastive`` once, ``embed_original`` and ``embed_composite`` for the consistency loss, steps the
optimiser and calls ``after_step``. In each of these forward passes BatchNorm normalises with the pass's own batch
statistics; only ``contrastive`` updates the running statistics, which evaluation uses.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

if TYPE_CHECKING:  # the configuration imports the table of methods
    from cocor.config.options import Config as Config
else:
    Config = Any


def identity(tensor: Tensor) -> Tensor:
    """Stand in for a collective on a single rank."""
    return tensor


@dataclass(frozen=True)
class Ranks:
    """This rank among ``size``, and its collectives.

    ``gather`` concatenates equally shaped tensors of all ranks along dimension 0; ``exchange`` is an all-to-all of
    equal parts.
    """

    rank: int = 0
    size: int = 1
    gather: Callable[[Tensor], Tensor] = identity
    exchange: Callable[[Tensor], Tensor] = identity


def precise(tensor: Tensor) -> Tensor:
    """Convert to at least float32."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def normalised(features: Tensor) -> Tensor:
    """Scale rows (..., d) to length 1, in at least float32.

    A zero row stays zero and receives no gradient.
    """
    features = precise(features)
    squares = features.square().sum(-1, keepdim=True)
    zero = squares < torch.finfo(squares.dtype).tiny
    return torch.where(zero, 0.0, features * torch.where(zero, 1.0, squares).rsqrt())


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        return ranks.gather(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.chunk(ctx.ranks.size)[ctx.ranks.rank] * ctx.ranks.size, None


def joined(tensor: Tensor, ranks: Ranks) -> Tensor:
    """Concatenate ``tensor`` (B, ...) of all ranks, with gradient in this one's.

    For losses of the global batch that every rank computes alike: this rank's gradient is that of the global loss times
    the number of ranks, so that averaging over ranks gives the global gradient. The backward pass needs no
    communication.
    """
    return tensor if ranks.size == 1 else _Joined.apply(tensor, ranks)


class Method(nn.Module):
    """A contrastive method, whose ``state_dict`` is all that is needed to resume.

    Its constructor takes a backbone, :class:`Ranks` and its options by their names. ``backbone`` maps images (B, C, H,
    W) to features (B, D). ``metrics`` holds detached scalars () of the last ``contrastive`` call, whose mean over ranks
    is the global batch's: ``loss``, ``feature_std`` and more if the method has any.

    On a CPU the passes of composites run in threads, on a deep copy with the same tensors: ``embed_composite`` neither
    reads nor sets other attributes that change.
    """

    # Literals, as they are read from the source too (cocor.methods.spec).
    defaults: dict[str, Any] = {}  # of options, where they differ from those of cocor.config.options
    options: tuple[str, ...] = ()  # that are for some methods only, this one among them
    needs_labels = False  # of every image

    cost = 4  # of the loss: forward passes an image, a backward pass is 2
    accumulates = False  # whether the loss of a batch is the mean of its parts' losses, but for BatchNorm
    own_batch_norm: tuple[str, ...] = ()  # children whose BatchNorm --sync-bn leaves alone

    backbone: nn.Module
    metrics: dict[str, Tensor]
    kept_features: list[Tensor] | None = None  # of the contrastive views, while an auxiliary asks for them
    total_steps: int = 1  # of the run, for what a method schedules itself

    def __init__(self, backbone: nn.Module, ranks: Ranks) -> None:
        super().__init__()
        self.backbone, self.ranks, self.metrics = backbone, ranks, {}

    @classmethod
    def from_config(cls, config: Config, ranks: Ranks, backbone: nn.Module) -> Self:
        """Build the method around ``backbone`` with its options in ``config``."""
        options: dict[str, Any] = {key: getattr(config, key) for key in cls.options}
        return cls(backbone, ranks=ranks, **options)

    @classmethod
    def check(cls, config: Config, ranks: int) -> None:
        """Raise a UserError for options that do not work on so many ranks."""

    @classmethod
    def remark(cls, config: Config, images: int) -> str:
        """Return a warning if the options do not suit so many training images."""
        return ""

    @classmethod
    def geometry(cls, config: Config, ranks: int) -> dict[str, int]:
        """Describe the layout over ranks, as far as it changes the method."""
        return {}

    @classmethod
    def chance_loss(cls, config: Config) -> tuple[str, float] | None:
        """Return formula and value of the loss of guessing; None if there is none."""
        return None

    @classmethod
    def views_with_gradient(cls, config: Config) -> int:
        """Count the contrastive views of which :meth:`features` computes features."""
        return 2

    def features(self, images: Tensor) -> Tensor:
        """Compute features (N, D) of contrastive views by the backbone, with gradient."""
        features = self.backbone(images)
        if self.kept_features is not None:
            self.kept_features.append(features)
        return features

    def loss_of(self, views: Tensor, labels: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the loss of views (V, B, C, H, W), and embeddings (B, d) of the first."""
        raise NotImplementedError

    def contrastive(self, views: Tensor, labels: Tensor | None = None) -> Tensor:
        """Compute the loss of views (V, B, C, H, W), over the batches of all ranks.

        Returns a scalar with gradient, and updates running statistics. ``labels`` (B,) int64 are for supervised
        methods; others ignore them.
        """
        loss, embeddings = self.loss_of(views, labels)
        self.metrics = {"loss": loss.detach(), "feature_std": feature_std(self.ranks.gather(embeddings.detach()))}
        return loss

    @torch.no_grad()
    def reevaluate(self, views: Tensor, labels: Tensor | None = None) -> Tensor:
        """Compute the loss of the same batch at the current weights; change no state.

        For use between ``contrastive`` and ``after_step``: keys, queue and target network are those of ``contrastive``.
        """
        with batch_statistics_only(self):
            return self.loss_of(views, labels)[0]

    def further_positive(self, images: Tensor, labels: Tensor | None = None) -> Tensor:
        """Compute the loss of one more view (B, C, H, W) of the images, a scalar.

        For use between ``contrastive`` and ``after_step``: what the view is attracted to (keys, projections) is that of
        ``contrastive``, and gets no gradient.
        """
        raise NotImplementedError

    def encode(self, images: Tensor) -> Tensor:
        """Embed images (N, C, H, W) by backbone and head: normalised (N, d) with gradient."""
        raise NotImplementedError

    @torch.no_grad()
    def embed_original(self, images: Tensor) -> Tensor:
        """Embed originals (N, C, H, W): normalised (N, d) float32 without gradient."""
        with batch_statistics_only(self):
            return self.encode(images)

    def embed_composite(self, images: Tensor) -> Tensor:
        """Embed composites (N, C, H, W): normalised (N, d) float32 with gradient."""
        with batch_statistics_only(self):
            return self.encode(images)

    def after_step(self) -> None:
        """Update moving averages and queues; called once per step, after the optimiser."""

    def parameter_groups(self, weight_decay: float) -> list[dict[str, Any]]:
        """Group the parameters.

        Those with ``fixed_lr`` keep the base learning rate; with LARS an ``lr_share`` scales it. The first group has
        none of both and holds the backbone's weights.
        """
        parameters = [p for p in self.parameters() if p.requires_grad]
        return [{"params": parameters, "weight_decay": weight_decay, "fixed_lr": False}]


class Predicting(Method):
    """A method of views that predict each other, by a predictor behind a projector.

    CoCor's loss compares composites behind backbone, projector and predictor with the original behind backbone and
    projector, without gradient (paper, appendix "Experimental Setup for Pre-training", for SimSiam).
    """

    accumulates = True

    projector: nn.Module
    predictor: nn.Module
    targets: Sequence[Tensor] = ()  # projections of the last contrastive views that predictions aimed at, detached

    def error(self, prediction: Tensor, target: Tensor) -> Tensor:
        """Compute the loss of one prediction (B, d) of one target (B, d)."""
        raise NotImplementedError

    def further_positive(self, images: Tensor, labels: Tensor | None = None) -> Tensor:
        """Predict the projections of all contrastive views from one more view."""
        with batch_statistics_only(self):
            prediction = self.predictor(self.projector(self.backbone(images)))
        return torch.stack([self.error(prediction, target) for target in self.targets]).sum()

    def encode(self, images: Tensor) -> Tensor:
        """Embed images by backbone and projector."""
        return normalised(self.projector(self.backbone(images)))

    def embed_composite(self, images: Tensor) -> Tensor:
        """Embed composites by backbone, projector and predictor."""
        with batch_statistics_only(self):
            return normalised(self.predictor(self.projector(self.backbone(images))))


class Decorrelating(Method):
    """A method whose ``criterion`` judges the projections of two views, dimension by dimension.

    CoCor embeds originals and composites by backbone and projector.
    """

    projector: nn.Module

    def criterion(self, first: Tensor, second: Tensor) -> Tensor:
        """Compute the loss of projections (N, d) of the global batch."""
        raise NotImplementedError

    def loss_of(self, views: Tensor, labels: Tensor | None) -> tuple[Tensor, Tensor]:
        """Compute the global loss; also return the projections of the first view."""
        first, second = (self.projector(self.features(images)) for images in views)
        with torch.autocast(views.device.type, enabled=False):
            return self.criterion(*(joined(precise(part), self.ranks) for part in (first, second))), first

    def encode(self, images: Tensor) -> Tensor:
        """Embed images by backbone and projector."""
        return normalised(self.projector(self.features(images)))


@contextmanager
def batch_statistics_only(module: nn.Module) -> Iterator[None]:
    """Keep BatchNorm in training mode from updating its running statistics.

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
    """Return the width D of a timm model's features."""
    return int(getattr(backbone, "head_hidden_size", None) or backbone.num_features)  # type: ignore[arg-type]


def feature_std(features: Tensor) -> Tensor:
    """Average the standard deviation of normalised features (B, d), times sqrt(d).

    About 1 for features that are spread over the sphere, 0 if all have collapsed to one point.
    """
    features = normalised(features.detach())
    return features.std(0, correction=0).mean() * features.shape[1] ** 0.5


def product_norm(first: Tensor, second: Tensor) -> Tensor:
    """Compute ``|A^T B|^2``, the sum of squares of a product (d, d), for A, B (N, d).

    As it is the sum of ``A A^T * B B^T`` too, no matrix larger than min(N, d) a side is made.
    """
    if len(first) < first.shape[1]:
        return ((first @ first.T) * (second @ second.T)).sum()
    return (first.T @ second).square().sum()


def two_layer_head(width: int, dim: int) -> nn.Sequential:
    """Build the head of MoCo v2 and of SupCon: features (N, width) -> (N, dim)."""
    return nn.Sequential(nn.Linear(width, width), nn.ReLU(inplace=True), nn.Linear(width, dim))


def three_layer_head(width: int, hidden: int, dim: int, *, hidden_bias: bool = False,
                     last_bias: bool = False) -> nn.Sequential:  # fmt: skip
    """Build the head of Barlow Twins, VICReg and INTL: (N, width) -> (N, dim)."""
    return nn.Sequential(
        nn.Linear(width, hidden, bias=hidden_bias),
        nn.BatchNorm1d(hidden),
        nn.ReLU(inplace=True),
        nn.Linear(hidden, hidden, bias=hidden_bias),
        nn.BatchNorm1d(hidden),
        nn.ReLU(inplace=True),
        nn.Linear(hidden, dim, bias=last_bias),
    )
