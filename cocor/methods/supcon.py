"""SupCon: views of the same class attract each other, all other views of the batch repel.

Source: Khosla et al. 2020, their loss "out", which averages over positives outside the logarithm. The head is 2048-2048
(ReLU)-128. Their code multiplies by temperature / 0.07, which is 1 at its default; here that factor is left out. CoCor
embeds originals and composites with encoder and head (paper, appendix "Experimental Setup for Pre-training").
"""

import torch
from torch import Tensor, nn

from cocor.methods.base import (
    Config,
    Method,
    Ranks,
    batch_statistics_only,
    feature_size,
    feature_std,
    joined,
    normalised,
    two_layer_head,
)


class SupCon(Method):
    """SupCon on ``backbone``."""

    # The paper's rate; its authors' is 0.05 for this batch.
    defaults = {"lr": 0.03, "epochs": 100, "temperature": 0.07, "final_lr": 1e-3, "blur_prob": (0.0,)}
    options = ("temperature", "embedding_dim")
    needs_labels = True
    cost = 6

    def __init__(
        self,
        backbone: nn.Module,
        *,
        dim: int = 128,
        temperature: float = 0.07,
        ranks: Ranks = Ranks(),
    ) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = two_layer_head(feature_size(backbone), dim)
        self.temperature = temperature
        self.ranks = ranks
        self.metrics = {}

    @classmethod
    def from_config(cls, config: Config, ranks: Ranks, backbone: nn.Module) -> "SupCon":
        return cls(backbone, dim=config.embedding_dim, temperature=config.temperature, ranks=ranks)

    def contrastive(self, views: Tensor, labels: Tensor | None = None) -> Tensor:
        """The loss of views (2, B, 3, H, W) with ``labels`` (B,), over the batches of all ranks."""
        embeddings = torch.stack([self.encode(images) for images in views])
        loss = self._loss(embeddings, labels)
        self.metrics = {"loss": loss.detach(), "feature_std": feature_std(embeddings[0])}
        return loss

    @torch.no_grad()
    def reevaluate(self, views: Tensor, labels: Tensor | None = None) -> Tensor:
        """The loss of ``views`` at the present weights."""
        with batch_statistics_only(self):
            return self._loss(torch.stack([self.encode(images) for images in views]), labels)

    def encode(self, images: Tensor) -> Tensor:
        """Backbone and head."""
        return normalised(self.head(self.backbone(images)))

    def _loss(self, embeddings: Tensor, labels: Tensor | None) -> Tensor:
        """The global loss of this rank's embeddings (V, B, dim). Rows are ordered by rank, then sample, then view."""
        assert labels is not None
        views = len(embeddings)
        everything = joined(embeddings.transpose(0, 1).contiguous(), self.ranks)
        labels = self.ranks.gather(labels).repeat_interleave(views)
        with torch.autocast(embeddings.device.type, enabled=False):
            return supervised_contrastive(everything.flatten(0, 1), labels, self.temperature)


def supervised_contrastive(embeddings: Tensor, labels: Tensor, temperature: float) -> Tensor:
    """Mean over anchors i of ``-mean_p log(exp(z_i z_p / T) / sum_{a != i} exp(z_i z_a / T))``.

    ``embeddings`` (N, d) are normalised, p runs over the other views with i's label in ``labels`` (N,). An anchor
    without any such view adds 0 to the mean; with two views per image every anchor has at least one.
    """
    logits = embeddings @ embeddings.T / temperature
    itself = torch.eye(len(logits), dtype=torch.bool, device=logits.device)
    positive = (labels[:, None] == labels[None]) & ~itself
    log_share = logits - logits.masked_fill(itself, -torch.inf).logsumexp(1, keepdim=True)
    count = positive.sum(1)
    return -((log_share * positive).sum(1) / count.clamp_min(1)).mean()
