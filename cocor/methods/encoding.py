"""What all methods have in common: an embedding by backbone and head, of which CoCor compares cosine similarities."""

import torch
from torch import Tensor, nn

from cocor.methods.base import Method, batch_statistics_only


class Encoding(Method):
    """A method that embeds originals and, unless it overrides ``embed_composite``, composites with :meth:`encode`."""

    def encode(self, images: Tensor) -> Tensor:
        """Images (N, 3, H, W) -> normalised embeddings (N, dim) with gradient."""
        raise NotImplementedError

    @torch.no_grad()
    def embed_original(self, images: Tensor) -> Tensor:
        with batch_statistics_only(self):
            return self.encode(images)

    def embed_composite(self, images: Tensor) -> Tensor:
        with batch_statistics_only(self):
            return self.encode(images)


def two_layer_head(width: int, dim: int) -> nn.Sequential:
    """The head of MoCo v2 and of SupCon: features (N, width) -> (N, dim)."""
    return nn.Sequential(nn.Linear(width, width), nn.ReLU(inplace=True), nn.Linear(width, dim))
