"""SimSiam: two views predict each other, without negatives or second encoder.

Source: Chen & He 2021, with the layers of the authors' code. CoCor passes composites through backbone, projector and
predictor, and the original through backbone and projector without gradient (paper, appendix "Experimental Setup for
Pre-training"). On several ranks BatchNorm is synchronised (``--sync-bn``), as the authors do.
"""

from typing import Any

from torch import Tensor, nn

from cocor.methods.base import Predicting, Ranks, feature_size, normalised


class SimSiam(Predicting):
    """SimSiam on ``backbone``: a projector and a predictor.

    The projector has three layers or, as its authors have it on CIFAR-10, two. They are ``projector_dim`` wide, as the
    SimSiam paper says. The authors' code makes them as wide as the backbone's features, which is the same for
    ResNet-50. With ``fix_predictor_lr`` the predictor's learning rate does not decay.
    """

    # The loss, which the paper leaves open, as it won on CIFAR-10 (benchmarks/README.md).
    defaults = {
        "lr": 0.05, "constants": (0.75, 0.70, 0.60), "sync_bn": True,
        "consistency_weight": 3.0, "consistency_beta": 8.0,
    }  # fmt: skip
    options = ("projector_dim", "projector_layers", "predictor_dim", "fix_predictor_lr")
    cost = 6

    def __init__(self, backbone: nn.Module, ranks: Ranks = Ranks(), *, projector_dim: int = 2048,
                 projector_layers: int = 3, predictor_dim: int = 512,
                 fix_predictor_lr: bool = False) -> None:  # fmt: skip
        super().__init__(backbone, ranks)
        self._fix_predictor_lr, dim = fix_predictor_lr, projector_dim
        self.projector = nn.Sequential(
            *_hidden_layer(feature_size(backbone), dim),
            *(part for _ in range(projector_layers - 2) for part in _hidden_layer(dim, dim)),
            nn.Linear(dim, dim, bias=False),
            nn.BatchNorm1d(dim, affine=False),
        )
        self.predictor = nn.Sequential(
            *_hidden_layer(dim, predictor_dim),
            nn.Linear(predictor_dim, dim),
        )

    def parameter_groups(self, weight_decay: float) -> list[dict[str, Any]]:
        """Group encoder and predictor apart."""
        encoder = [*self.backbone.parameters(), *self.projector.parameters()]
        predictor = list(self.predictor.parameters())
        return [
            {"params": encoder, "weight_decay": weight_decay, "fixed_lr": False},
            {"params": predictor, "weight_decay": weight_decay, "fixed_lr": self._fix_predictor_lr},
        ]

    def loss_of(self, views: Tensor, labels: Tensor | None) -> tuple[Tensor, Tensor]:
        """Compute the negative cosine; also return the projections of the first view."""
        first, second = (self.projector(self.features(images)) for images in views)
        self.targets = first.detach(), second.detach()
        return self.error(self.predictor(first), second) + self.error(self.predictor(second), first), first

    def error(self, prediction: Tensor, target: Tensor) -> Tensor:
        """Average half the negative cosine over the batch; the target gets no gradient."""
        return -0.5 * (normalised(prediction) * normalised(target.detach())).sum(1).mean()


def _hidden_layer(width: int, dim: int) -> list[nn.Module]:
    # A linear layer before a BatchNorm needs no bias: it would be subtracted again.
    return [nn.Linear(width, dim, bias=False), nn.BatchNorm1d(dim), nn.ReLU(inplace=True)]
