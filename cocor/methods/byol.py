"""BYOL: an online network predicts the projections of a slowly moving copy.

Source: Grill et al. 2020, their loss ``2 - 2 cos`` in both directions, target momentum ``1 - (1 - m0)(cos(pi k / K) +
1) / 2`` at step k of K. Projector and predictor have one hidden layer each, with BatchNorm and ReLU, and no biases. The
target normalises with its own batch statistics, as theirs does. The CoCor paper reports results with BYOL, but not
where its loss attaches; here it does as with SimSiam, to the online network (``Predicting``).
"""

import copy
import math

import torch
from torch import Tensor, nn

from cocor.methods.base import Predicting, Ranks, feature_size, normalised


class BYOL(Predicting):
    """BYOL with hidden layers of ``projector_dim`` and ``predictor_dim``.

    ``total_steps`` is the K of the momentum's schedule; the buffer ``step`` counts its k, and is saved in checkpoints.
    """

    # The authors' rate and momentum for 300 epochs, the rate scaled from their batch of 4,096 to 256.
    defaults = {
        "optimiser": "lars", "lr": 0.3, "weight_decay": 1e-6, "decay_biases": False, "warmup_epochs": 10,
        "sync_bn": True, "key_momentum": 0.99, "embedding_dim": 256, "projector_dim": 4096, "predictor_dim": 4096,
        "crop_scale_min": 0.08, "saturation": 0.2, "blur_prob": (1.0, 0.1), "solarize_prob": (0.0, 0.2),
    }  # fmt: skip
    options = ("key_momentum", "embedding_dim", "projector_dim", "predictor_dim")
    cost = 8

    step: Tensor

    def __init__(self, backbone: nn.Module, ranks: Ranks = Ranks(), *, embedding_dim: int = 256,
                 projector_dim: int = 4096, predictor_dim: int = 4096, key_momentum: float = 0.99) -> None:  # fmt: skip
        super().__init__(backbone, ranks)
        self.projector = _perceptron(feature_size(backbone), projector_dim, embedding_dim)
        self.predictor = _perceptron(embedding_dim, predictor_dim, embedding_dim)
        self.target_backbone = copy.deepcopy(self.backbone).requires_grad_(False)
        self.target_projector = copy.deepcopy(self.projector).requires_grad_(False)
        self.momentum = key_momentum
        self.register_buffer("step", torch.zeros((), dtype=torch.int64))

    @torch.no_grad()
    def after_step(self) -> None:
        """Move the target's parameters towards the online network's."""
        targets: list[Tensor] = [*self.target_backbone.parameters(), *self.target_projector.parameters()]
        online: list[Tensor] = [*self.backbone.parameters(), *self.projector.parameters()]
        share = (1.0 - target_momentum(self.step, self.total_steps, self.momentum)).to(targets[0].dtype)
        torch._foreach_add_(targets, torch._foreach_mul(torch._foreach_sub(online, targets), share))
        self.step += 1

    def loss_of(self, views: Tensor, labels: Tensor | None) -> tuple[Tensor, Tensor]:
        """Compute the loss, in [0, 8]; also return the projections of the first view."""
        with torch.no_grad():
            first, second = self.targets = [self.target_projector(self.target_backbone(images)) for images in views]
        projections = [self.projector(self.features(images)) for images in views]
        predictions = [self.predictor(projection) for projection in projections]
        return self.error(predictions[0], second) + self.error(predictions[1], first), projections[0]

    def error(self, prediction: Tensor, target: Tensor) -> Tensor:
        return prediction_error(prediction, target)


def prediction_error(prediction: Tensor, target: Tensor) -> Tensor:
    """Average ``|p / |p| - z / |z||^2 = 2 - 2 cos``, both (B, d); in at least float32."""
    return 2.0 - 2.0 * (normalised(prediction) * normalised(target)).sum(1).mean()


def target_momentum(step: Tensor, total: int, start: float) -> Tensor:
    """Return ``1 - (1 - start) (cos(pi k / K) + 1) / 2`` in float64: ``start`` to 1."""
    progress = (step.double() / total).clamp(max=1.0)
    return 1.0 - (1.0 - start) * (torch.cos(math.pi * progress) + 1.0) / 2.0


def _perceptron(width: int, hidden: int, out: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(width, hidden, bias=False),
        nn.BatchNorm1d(hidden),
        nn.ReLU(inplace=True),
        nn.Linear(hidden, out, bias=False),
    )
