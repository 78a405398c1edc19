"""SimCLR: two views of an image attract each other, all others of a batch repel.

Source: Chen et al. 2020 ("A Simple Framework for Contrastive Learning of Visual Representations"): NT-Xent over the 2 N
views of the global batch, behind a head of two linear layers without biases, each with BatchNorm, the last without
shift. NT-Xent is SupCon's loss where every image is a class of its own. The authors' BatchNorm has the statistics of
both views together; here each view has its own, as in all methods.
"""

import math

import torch
from torch import Tensor, nn

from cocor.methods.base import Config, Ranks, feature_size
from cocor.methods.supcon import SupCon


class SimCLR(SupCon):
    """SimCLR on ``backbone``, with a head as wide as its features.

    CoCor embeds originals and composites with encoder and head, as with SupCon (the paper does not report SimCLR). The
    original has no gradient, though NT-Xent has one through both of its views: the original is what its composites'
    distances are measured from, and must not come to meet them.
    """

    # The authors' settings, the rate for a batch of 256 (theirs, 4,096, has 4.8).
    defaults = {
        "optimiser": "lars", "lr": 0.3, "weight_decay": 1e-6, "decay_biases": False, "warmup_epochs": 10,
        "sync_bn": True, "temperature": 0.1,
        "crop_scale_min": 0.08, "brightness": 0.8, "contrast": 0.8, "saturation": 0.8, "hue": 0.2,
    }  # fmt: skip
    options = ("temperature", "embedding_dim")
    needs_labels = False
    cost = 6

    def __init__(self, backbone: nn.Module, ranks: Ranks = Ranks(), *, embedding_dim: int = 128,
                 temperature: float = 0.1) -> None:  # fmt: skip
        super().__init__(backbone, ranks, embedding_dim=embedding_dim, temperature=temperature)
        width = feature_size(backbone)
        self.head = nn.Sequential(
            nn.Linear(width, width, bias=False),
            nn.BatchNorm1d(width),
            nn.ReLU(inplace=True),
            nn.Linear(width, embedding_dim, bias=False),
            nn.BatchNorm1d(embedding_dim),
        )
        self.head[-1].bias.requires_grad_(False)

    @classmethod
    def chance_loss(cls, config: Config) -> tuple[str, float]:
        return "ln(2N - 1)", math.log(2 * config.batch_size - 1)

    def loss_of(self, views: Tensor, labels: Tensor | None) -> tuple[Tensor, Tensor]:
        """Compute the global loss; also return the embeddings of the first view."""
        return super().loss_of(views, self._numbers(views[0]))

    def further_positive(self, images: Tensor, labels: Tensor | None = None) -> Tensor:
        return super().further_positive(images, self._numbers(images))

    def _numbers(self, images: Tensor) -> Tensor:
        """Number this rank's images within the global batch, (B,)."""
        return torch.arange(len(images), device=images.device) + self.ranks.rank * len(images)
