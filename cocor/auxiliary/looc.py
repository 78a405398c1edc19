"""LooC: leave-one-out heads, each sensitive to one augmentation only.

Source: Xiao et al. 2021 ("What Should Not Be Contrastive in Contrastive Learning"), their loss of n + 1 spaces; no code
is published. Beside the two contrastive views there is a view for each augmentation i with the parameters of the first
in i alone. In the space of head i the query's positive is that view's key; the keys of all other views of the same
image, which differ in i, are negatives, and so are the keys in a queue of the head's own:

    L_i = -log( exp(q_i k_i / T) / (sum_j exp(q_i k_j / T) + sum_queue exp(q_i k / T)) )    j over all n + 1 keys

The invariant space, L_0, is the method's own loss. The paper divides the sum of all by n + 1; here L_0 keeps its weight
and the L_i are added (``--auxiliary-weight``). It keeps rotation, colour or texture; here ``--looc-kept`` has

    crop    crop and flip of the first view, colours of its own
    color   colour jitter, grey, blur and solarisation of the first view, a crop of its own

drawn by the view plan. Heads are as MoCo's, with a slowly moving copy and a queue of k_i each. Their keys take passes
of the key encoder, one for the second view and one for each further view. With ``--symmetric`` only the first view
asks.
"""

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cocor.auxiliary.clsa import Queued
from cocor.methods.base import Config, Method, feature_size, normalised, two_layer_head
from cocor.methods.moco import MoCo
from loaders.batch import Batch


class LooC(Queued):
    """A head, a copy of it and a queue for each part of a view that is kept."""

    options = ("auxiliary_weight", "looc_kept")

    queues: Tensor
    pointer: Tensor

    def __init__(self, config: Config, method: Method) -> None:
        super().__init__(config, method)
        count = len(config.looc_kept)
        width, dim = feature_size(method.backbone), config.embedding_dim
        self.heads = nn.ModuleList(two_layer_head(width, dim) for _ in range(count))
        self.key_heads = copy.deepcopy(self.heads).requires_grad_(False)
        start = torch.randn(count, config.queue_size, dim, generator=torch.Generator().manual_seed(1))
        self.register_buffer("queues", normalised(start))
        self.register_buffer("pointer", torch.zeros((), dtype=torch.int64))
        self._keys: list[Tensor] = []  # of the step under way, all ranks': those that enter each queue

    @classmethod
    def cost(cls, config: Config) -> float:
        return 1.0 + len(config.looc_kept)

    def loss(self, method: Method, batch: Batch, features: Sequence[Tensor]) -> Tensor:
        assert isinstance(method, MoCo) and batch.kept is not None
        (query, *_), ranks = features, method.ranks
        with torch.no_grad():  # for each view the keys in all spaces, (ranks * B, n, d)
            views = [method.encode_keys(images, self._embed_keys) for images in (batch.views[1], *batch.kept)]
        self._keys = [keys[:, space] for space, keys in enumerate(views[1:])]
        mine = torch.stack([keys.chunk(ranks.size)[ranks.rank] for keys in views])  # (1 + n, B, n, d)
        losses = []
        for space, head in enumerate(self.heads):
            asked = normalised(head(query))
            with torch.autocast(asked.device.type, enabled=False):
                own = torch.einsum("bd,vbd->bv", asked, mine[:, :, space].to(asked.dtype))
                logits = torch.cat([own, asked @ self.queues[space].T.to(asked.dtype)], 1) / method.temperature
                target = torch.full_like(batch.index, 1 + space)
                losses.append(F.cross_entropy(logits, target))
        return torch.stack(losses).sum()

    @torch.no_grad()
    def after_step(self, method: Method) -> None:
        """Enqueue each space's keys, and move the copies towards the heads."""
        assert isinstance(method, MoCo)
        size, count = self.queues.shape[1], len(self._keys[0])
        slots = (self.pointer + torch.arange(count, device=self.queues.device)) % size
        self.queues.index_copy_(1, slots, torch.stack(self._keys).to(self.queues.dtype))
        self.pointer.copy_((self.pointer + count) % size)
        self._keys = []
        keys: list[Tensor] = list(self.key_heads.parameters())
        heads: list[Tensor] = list(self.heads.parameters())
        torch._foreach_lerp_(keys, heads, 1.0 - method.momentum)

    def _embed_keys(self, features: Tensor) -> Tensor:
        """Embed features (N, D) in all spaces, (N, n, d)."""
        return torch.stack([normalised(head(features)) for head in self.key_heads], 1)
