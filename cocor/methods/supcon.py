"""SupCon: views of the same class attract each other, all others repel.

Source: Khosla et al. 2020, their loss "out", which averages over positives outside the logarithm. The head is 2048-2048
(ReLU)-128. Their code multiplies by temperature / 0.07, which is 1 at its default; here that factor is left out. CoCor
embeds originals and composites with encoder and head (paper, appendix "Experimental Setup for Pre-training").
"""

import torch
from torch import Tensor, nn

from cocor.methods.base import Method, Ranks, feature_size, joined, normalised, two_layer_head


class SupCon(Method):
    """SupCon on ``backbone``."""

    # The paper's rate; its authors' is 0.05 for this batch.
    defaults = {"lr": 0.03, "epochs": 100, "temperature": 0.07, "final_lr": 1e-3, "blur_prob": (0.0,)}
    options = ("temperature", "embedding_dim")
    needs_labels = True
    cost = 6

    def __init__(self, backbone: nn.Module, ranks: Ranks = Ranks(), *, embedding_dim: int = 128,
                 temperature: float = 0.07) -> None:  # fmt: skip
        super().__init__(backbone, ranks)
        self.head = two_layer_head(feature_size(backbone), embedding_dim)
        self.temperature = temperature

    def loss_of(self, views: Tensor, labels: Tensor | None) -> tuple[Tensor, Tensor]:
        """Compute the global loss; also return the embeddings of the first view."""
        assert labels is not None
        embeddings = torch.stack([self.encode(images) for images in views], 1)
        self._embeddings = embeddings.detach()
        return self._loss(embeddings, labels), embeddings[:, 0]

    def further_positive(self, images: Tensor, labels: Tensor | None = None) -> Tensor:
        """Compute the loss of one more view and the contrastive ones, detached."""
        assert labels is not None
        return self._loss(torch.cat([self.embed_composite(images)[:, None], self._embeddings], 1), labels)

    def _loss(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """Compute the global loss of embeddings (B, V, d)."""
        everything = joined(embeddings, self.ranks)  # ordered by rank, then sample, then view
        labels = self.ranks.gather(labels).repeat_interleave(embeddings.shape[1])
        with torch.autocast(embeddings.device.type, enabled=False):
            return supervised_contrastive(everything.flatten(0, 1), labels, self.temperature)

    def encode(self, images: Tensor) -> Tensor:
        """Embed images by backbone and head."""
        return normalised(self.head(self.features(images)))


def supervised_contrastive(embeddings: Tensor, labels: Tensor, temperature: float) -> Tensor:
    """Average ``-mean_p log(exp(z_i z_p / T) / sum_{a != i} exp(z_i z_a / T))``.

    ``embeddings`` (N, d) are normalised, p runs over the other views with i's label in ``labels`` (N,). An anchor
    without any such view adds 0 to the mean; with two views per image every anchor has at least one.
    """
    logits = embeddings @ embeddings.T / temperature
    itself = torch.eye(len(logits), dtype=torch.bool, device=logits.device)
    positive = (labels[:, None] == labels[None]) & ~itself
    log_share = logits - logits.masked_fill(itself, -torch.inf).logsumexp(1, keepdim=True)
    count = positive.sum(1)
    return -((log_share * positive).sum(1) / count.clamp_min(1)).mean()
