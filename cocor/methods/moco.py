"""MoCo v2: contrast with a queue of keys from a slowly moving copy of the encoder.

Source: He et al. 2020 and Chen et al. 2020 ("Improved Baselines with Momentum Contrastive Learning"). The query encoder
sees view 0 and the key encoder view 1; InfoNCE contrasts a query's own key with the K keys in the queue (1 + K logits).
CoCor embeds both originals and composites with the query encoder, head included (paper, appendix "Experimental Setup
for Pre-training").

Batch statistics shared by a query and its key would let the network cheat. So the global batch of keys is shuffled and
cut into groups with separate BatchNorm statistics, ``key_bn_splits`` on each rank (``cocor.methods.shuffle``).
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from cocor.methods import shuffle
from cocor.methods.base import Gather, batch_statistics_only, feature_size, feature_std
from cocor.methods.encoding import Encoding, two_layer_head
from cocor.methods.grouped_norm import group_batch_norm
from cocor.objective.consistency import identity, normalised
from loaders.errors import UserError


class MoCo(Encoding):
    """MoCo v2 on ``backbone`` with a queue of ``queue`` keys. ``gather`` concatenates equally shaped tensors of all
    ranks along dimension 0; ``exchange`` is an all-to-all of equal parts (``cocor.distributed.collectives``).

    With ``key_bn_splits`` 1 on a single rank the keys are encoded as one batch, without shuffling.
    """

    queue: Tensor
    pointer: Tensor
    step: Tensor

    def __init__(
        self,
        backbone: nn.Module,
        *,
        dim: int = 128,
        queue: int = 65536,
        temperature: float = 0.2,
        momentum: float = 0.999,
        key_bn_splits: int = 4,
        gather: Gather = identity,
        exchange: Gather = identity,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = two_layer_head(feature_size(backbone), dim)
        self.key_backbone = copy.deepcopy(self.backbone).requires_grad_(False)
        self.key_head = copy.deepcopy(self.head).requires_grad_(False)
        self.temperature, self.momentum, self.key_bn_splits = temperature, momentum, key_bn_splits
        self.gather, self.exchange, self.rank, self.world = gather, exchange, rank, world
        self._groups_inside = key_bn_splits > 1 and group_batch_norm(self.key_backbone, key_bn_splits)
        # A generator of its own: all ranks start from the same queue, whatever they have drawn before.
        start = torch.randn(queue, dim, generator=torch.Generator().manual_seed(0))
        self.register_buffer("queue", normalised(start))
        self.register_buffer("pointer", torch.zeros((), dtype=torch.int64))
        self.register_buffer("step", torch.zeros((), dtype=torch.int64))
        self.metrics = {}
        self._keys: Tensor | None = None  # all ranks' keys of the step under way

    def contrastive(self, views: Tensor, labels: Tensor | None = None) -> Tensor:
        """InfoNCE of views (2, B, 3, H, W) in float32. ``UserError`` when the queue cannot hold one global batch."""
        images, key_images = views
        self._check_batch(len(images))
        with torch.no_grad():
            self._keys = self._encode_keys(key_images)
        queries = self.encode(images)
        positive, negative = self._logits(queries)
        loss = _info_nce(positive, negative)
        with torch.no_grad():
            accuracy = (positive > negative.amax(1)).float().mean()
        self.metrics = {"loss": loss.detach(), "top1": accuracy, "feature_std": feature_std(queries)}
        return loss

    @torch.no_grad()
    def reevaluate(self, views: Tensor, labels: Tensor | None = None) -> Tensor:
        """The loss of the last ``contrastive`` call with the current query encoder and the same keys."""
        with batch_statistics_only(self.backbone):
            return _info_nce(*self._logits(self.encode(views[0])))

    def encode(self, images: Tensor) -> Tensor:
        """The query encoder, with its head."""
        return normalised(self.head(self.backbone(images)))

    @torch.no_grad()
    def after_step(self) -> None:
        """Enqueue the step's keys and move the key encoder (parameters only) towards the query encoder.

        The queue is changed in place, which is why it waits until the backward pass no longer needs it.
        """
        if self._keys is None:
            raise RuntimeError("after_step follows contrastive, once")
        size, count = len(self.queue), len(self._keys)
        slots = (self.pointer + torch.arange(count, device=self.queue.device)) % size
        self.queue.index_copy_(0, slots, self._keys.to(self.queue.dtype))
        self.pointer.copy_((self.pointer + count) % size)
        self.step += 1
        self._keys = None
        keys: list[Tensor] = [*self.key_backbone.parameters(), *self.key_head.parameters()]
        queries: list[Tensor] = [*self.backbone.parameters(), *self.head.parameters()]
        torch._foreach_lerp_(keys, queries, 1.0 - self.momentum)

    def parameter_groups(self, weight_decay: float) -> list[dict[str, Any]]:
        """One group of backbone and head; as in the authors' code biases and BatchNorm decay too. No predictor here."""
        parameters = [*self.backbone.parameters(), *self.head.parameters()]
        return [{"params": parameters, "weight_decay": weight_decay, "fixed_lr": False}]

    def _encode_keys(self, images: Tensor) -> Tensor:
        """Keys of all ranks (world * B, dim), in the order of the global batch."""
        if self.world == 1 and self.key_bn_splits == 1:
            return self._encode_key(images)
        groups = self.key_bn_splits * self.world
        # Channels-last images are contiguous as (N, H, W, C): indexing and sending them keeps that layout.
        mine = shuffle.shuffled(
            images.permute(0, 2, 3, 1).contiguous(), self.step, groups, world=self.world, rank=self.rank,
            exchange=self.exchange, gather=self.gather,
        ).permute(0, 3, 1, 2)  # fmt: skip
        parts = mine.tensor_split(1 if self._groups_inside else self.key_bn_splits)
        keys = self.gather(torch.cat([self._encode_key(part) for part in parts]))
        return torch.empty_like(keys).index_copy_(0, shuffle.order(self.step, len(keys), groups), keys)

    def _encode_key(self, images: Tensor) -> Tensor:
        return normalised(self.key_head(self.key_backbone(images)))

    def _logits(self, queries: Tensor) -> tuple[Tensor, Tensor]:
        """Logits of each query's own key (B,) and of the queue (B, K), float32 even under autocast."""
        if self._keys is None:
            raise RuntimeError("reevaluate needs the keys of contrastive and comes before after_step")
        local = len(queries)
        keys = self._keys[self.rank * local : (self.rank + 1) * local]
        with torch.autocast(queries.device.type, enabled=False):
            queries = queries / self.temperature
            return (queries * keys).sum(1), queries @ self.queue.T.to(queries.dtype)

    def _check_batch(self, local: int) -> None:
        if local * self.world > len(self.queue):
            raise UserError(
                f"queue_size: {len(self.queue)} keys cannot hold one batch of {local * self.world}; "
                "raise queue_size or lower batch_size"
            )
        if local < 2 * self.key_bn_splits:
            raise UserError(
                f"key_bn_splits: a batch of {local} leaves fewer than 2 keys to each of {self.key_bn_splits} groups; "
                "lower key_bn_splits or raise batch_size"
            )


def _info_nce(positive: Tensor, negative: Tensor) -> Tensor:
    """Cross-entropy of the 1 + K logits with the positive one as the label, without joining them into one matrix."""
    return (torch.logaddexp(positive, negative.logsumexp(1)) - positive).mean()
