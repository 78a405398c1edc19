"""MoCo v2: contrast with a queue of keys from a slowly moving copy of the encoder.

Source: He et al. 2020 and Chen et al. 2020 ("Improved Baselines with Momentum Contrastive Learning"). The query encoder
sees view 0 and the key encoder view 1; InfoNCE contrasts a query's own key with the K keys in the queue (1 + K logits).
CoCor embeds both originals and composites with the query encoder, head included (paper, appendix "Experimental Setup
for Pre-training").

``symmetric`` adds the same loss with the views' parts exchanged and halves the sum, at twice the passes; each view is a
batch of its own for BatchNorm. The keys of both enter the queue. (The symmetric demo of MoCo's authors adds without
halving, which is twice the learning rate.)

Batch statistics shared by a query and its key would let the network cheat. So the global batch of keys is shuffled and
cut into groups with separate BatchNorm statistics, ``key_bn_splits`` over all ranks (``cocor.methods.shuffle``).
"""

import copy
import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from cocor.methods import shuffle
from cocor.methods.base import (
    Config,
    Method,
    Ranks,
    batch_statistics_only,
    feature_size,
    feature_std,
    normalised,
    two_layer_head,
)
from cocor.methods.batchnorm import group_batch_norm
from loaders.errors import UserError

Logits = tuple[Tensor, Tensor]  # of a query's own key (B,) and of the queue (B, K)


class MoCo(Method):
    """MoCo v2 on ``backbone`` with a queue of ``queue_size`` keys.

    ``key_bn_splits`` counts groups of the global batch; with 1 the keys are encoded as one, without shuffling. As in
    the authors' code biases and BatchNorm decay too.
    """

    # The loss, which the paper leaves open, as it won on CIFAR-10 (benchmarks/README.md).
    defaults = {"lr": 0.03, "consistency_weight": 10.0, "consistency_beta": 8.0}
    options = ("queue_size", "key_bn_splits", "symmetric", "temperature", "key_momentum", "embedding_dim")
    own_batch_norm = ("key_backbone", "key_head")
    accumulates = True

    queue: Tensor
    pointer: Tensor
    step: Tensor

    def __init__(self, backbone: nn.Module, ranks: Ranks = Ranks(), *, embedding_dim: int = 128,
                 queue_size: int = 65536, temperature: float = 0.2, key_momentum: float = 0.999,
                 key_bn_splits: int = 8, symmetric: bool = False) -> None:  # fmt: skip
        super().__init__(backbone, ranks)
        self.head = two_layer_head(feature_size(backbone), embedding_dim)
        self.key_backbone = copy.deepcopy(self.backbone).requires_grad_(False)
        self.key_head = copy.deepcopy(self.head).requires_grad_(False)
        self.temperature, self.momentum, self.symmetric = temperature, key_momentum, symmetric
        self.groups = key_bn_groups(key_bn_splits, ranks.size)
        self._groups_inside = self.groups > 1 and group_batch_norm(self.key_backbone, self.groups)
        # A generator of its own: all ranks start from the same queue, whatever they have drawn before.
        start = torch.randn(queue_size, embedding_dim, generator=torch.Generator().manual_seed(0))
        self.register_buffer("queue", normalised(start))
        self.register_buffer("pointer", torch.zeros((), dtype=torch.int64))
        self.register_buffer("step", torch.zeros((), dtype=torch.int64))
        self.logits: list[Logits] = []  # of the step's queries, detached
        self._keys: list[Tensor] = []  # all ranks' keys of the step under way, for each view with queries

    @classmethod
    def check(cls, config: Config, ranks: int) -> None:
        if config.queue_size < (keys := config.batch_size * (1 + config.symmetric)):
            raise UserError(f"queue_size: {config.queue_size} is less than the keys of one step ({keys})")
        local, groups = config.batch_size // ranks // config.accumulate, key_bn_groups(config.key_bn_splits, ranks)
        if local % groups or local // groups < 2:
            fitting = max(n for n in range(1, groups + 1) if local % n == 0 and local // n >= 2)
            batch = f"{local * ranks} images on {ranks} ranks into equal groups of 2 or more"
            raise UserError(f"key_bn_splits: {config.key_bn_splits} does not cut {batch}; try {fitting * ranks}")

    @classmethod
    def remark(cls, config: Config, images: int) -> str:
        if config.queue_size < images:
            return ""
        # By chance an image's last key is no more than K images old for (K / N)^2 / 2 of the queries: 1 % at N / 8.
        fitting = max(1, images // 8 // config.batch_size) * config.batch_size
        return (
            f"--queue-size {config.queue_size}: the {images:,} images are no more than keys in the queue, so that "
            f"queries are contrasted with keys of their own image; use --queue-size {fitting}"
        )

    @classmethod
    def geometry(cls, config: Config, ranks: int) -> dict[str, int]:
        return {"BatchNorm groups of keys": key_bn_groups(config.key_bn_splits, ranks) * ranks}

    @classmethod
    def chance_loss(cls, config: Config) -> tuple[str, float]:
        return "ln(K + 1)", math.log(config.queue_size + 1)

    def contrastive(self, views: Tensor, labels: Tensor | None = None) -> Tensor:
        """Compute InfoNCE of views (2, B, C, H, W) in float32."""
        with torch.no_grad():
            keys = [self.encode_keys(images) for images in self._of_keys(views)]
        self._keys += keys
        queries = [self.encode(images) for images in self._of_queries(views)]
        logits = [self._logits(*pair) for pair in zip(queries, keys, strict=True)]
        loss = _mean([_info_nce(*pair) for pair in logits])
        if self.kept_features is not None:  # an auxiliary may ask for them; of a long queue they are large
            self.logits = [(positive.detach(), negative.detach()) for positive, negative in logits]
        with torch.no_grad():
            accuracy = _mean([(positive > negative.amax(1)).float().mean() for positive, negative in logits])
        spread = feature_std(self.ranks.gather(queries[0].detach()))
        self.metrics = {"loss": loss.detach(), "top1": accuracy, "feature_std": spread}
        return loss

    @torch.no_grad()
    def reevaluate(self, views: Tensor, labels: Tensor | None = None) -> Tensor:
        """Compute the loss anew, with the current query encoder and the same keys."""
        if not self._keys:
            raise RuntimeError("reevaluate needs the keys of contrastive and comes before after_step")
        with batch_statistics_only(self.backbone):
            queries = [self.encode(images) for images in self._of_queries(views)]
        return _mean([_info_nce(*self._logits(*pair)) for pair in zip(queries, self._keys, strict=True)])

    @classmethod
    def views_with_gradient(cls, config: Config) -> int:
        return 1 + config.symmetric

    def further_positive(self, images: Tensor, labels: Tensor | None = None) -> Tensor:
        """Contrast queries of one more view with the step's keys and the queue."""
        return _mean([_info_nce(*pair) for pair in self.contrast(images)])

    def contrast(self, images: Tensor) -> list[Logits]:
        """Compute the logits of one more view (B, C, H, W), for each of the step's keys."""
        with batch_statistics_only(self):
            queries = self.encode(images)
        return [self._logits(queries, keys) for keys in self._keys]

    def _of_queries(self, views: Tensor) -> list[Tensor]:
        return [views[0], views[1]] if self.symmetric else [views[0]]

    def _of_keys(self, views: Tensor) -> list[Tensor]:
        """The other view of each query."""
        return [views[1], views[0]] if self.symmetric else [views[1]]

    def encode(self, images: Tensor) -> Tensor:
        """Embed images by the query encoder, with its head."""
        return normalised(self.head(self.features(images)))

    @torch.no_grad()
    def after_step(self) -> None:
        """Enqueue the step's keys, and move the key encoder towards the query encoder.

        The queue is changed in place, which is why it waits until the backward pass no longer needs it.
        """
        if not self._keys:
            raise RuntimeError("after_step follows contrastive, once")
        enqueued = torch.cat(self._keys)
        size, count = len(self.queue), len(enqueued)
        slots = (self.pointer + torch.arange(count, device=self.queue.device)) % size
        self.queue.index_copy_(0, slots, enqueued.to(self.queue.dtype))
        self.pointer.copy_((self.pointer + count) % size)
        self.step += 1
        self._keys, self.logits = [], []
        keys: list[Tensor] = [*self.key_backbone.parameters(), *self.key_head.parameters()]
        queries: list[Tensor] = [*self.backbone.parameters(), *self.head.parameters()]
        torch._foreach_lerp_(keys, queries, 1.0 - self.momentum)

    def encode_keys(self, images: Tensor, head: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """Encode the keys of all ranks (ranks * B, dim), in the order of the global batch.

        ``head`` maps features of the key backbone to embeddings, by default those of the method. No gradient.
        """

        def encode(part: Tensor) -> Tensor:
            return normalised(self.key_head(self.key_backbone(part))) if head is None else head(self.key_backbone(part))

        ranks, groups = self.ranks, self.groups * self.ranks.size
        if groups == 1:
            return encode(images)
        # Channels-last images are contiguous as (N, H, W, C): indexing and sending them keeps that layout.
        channels_last = images.permute(0, 2, 3, 1).contiguous()
        mine = shuffle.shuffled(channels_last, self.step, groups, ranks).permute(0, 3, 1, 2)
        parts = mine.tensor_split(1 if self._groups_inside else self.groups)
        keys = ranks.gather(torch.cat([encode(part) for part in parts]))
        return torch.empty_like(keys).index_copy_(0, shuffle.order(self.step, len(keys), groups), keys)

    def _logits(self, queries: Tensor, keys: Tensor) -> Logits:
        """Compute logits of a query's own key (B,) and of the queue (B, K), in float32.

        ``keys`` are those of all ranks.
        """
        keys = keys.chunk(self.ranks.size)[self.ranks.rank]
        with torch.autocast(queries.device.type, enabled=False):
            queries = queries / self.temperature
            return (queries * keys).sum(1), queries @ self.queue.T.to(queries.dtype)


def key_bn_groups(splits: int, ranks: int) -> int:
    """Return a rank's BatchNorm groups of keys, of ``splits`` over all ranks."""
    return max(1, splits // ranks)


def _mean(values: list[Tensor]) -> Tensor:
    return values[0] if len(values) == 1 else torch.stack(values).mean()


def _info_nce(positive: Tensor, negative: Tensor) -> Tensor:
    """Compute the cross-entropy of 1 + K logits, without joining them."""
    return (torch.logaddexp(positive, negative.logsumexp(1)) - positive).mean()
