"""What SimSiam and BYOL have in common: a predictor after the projector, and two views that predict each other.

CoCor's loss compares composites behind backbone, projector and predictor with the original behind backbone and
projector, without gradient (paper, appendix "Experimental Setup for Pre-training", for SimSiam).
"""

import torch
from torch import Tensor, nn

from cocor.methods.base import batch_statistics_only, feature_std
from cocor.methods.encoding import Encoding
from cocor.objective.consistency import normalised


class Predicting(Encoding):
    """A method with ``projector`` and ``predictor`` on its backbone. Subclasses define :meth:`loss_of`."""

    projector: nn.Module
    predictor: nn.Module

    def loss_of(self, views: Tensor) -> tuple[Tensor, Tensor]:
        """The loss of views (2, B, 3, H, W) with gradient, and the projections (B, dim) of the first view."""
        raise NotImplementedError

    def contrastive(self, views: Tensor, labels: Tensor | None = None) -> Tensor:
        """The symmetrised loss of views (2, B, 3, H, W)."""
        loss, projections = self.loss_of(views)
        self.metrics = {"loss": loss.detach(), "feature_std": feature_std(projections)}
        return loss

    @torch.no_grad()
    def reevaluate(self, views: Tensor, labels: Tensor | None = None) -> Tensor:
        """The loss of ``views`` at the current weights; BYOL's target network has not been updated yet."""
        with batch_statistics_only(self):
            return self.loss_of(views)[0]

    def encode(self, images: Tensor) -> Tensor:
        """Backbone and projector."""
        return normalised(self.projector(self.backbone(images)))

    def embed_composite(self, images: Tensor) -> Tensor:
        """Backbone, projector and predictor with gradient: (N, 3, H, W) -> (N, dim)."""
        with batch_statistics_only(self):
            return normalised(self.predictor(self.projector(self.backbone(images))))
