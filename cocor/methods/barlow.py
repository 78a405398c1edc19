"""Barlow Twins: the correlation of two views' features is to be the identity.

Source: Zbontar et al. 2021, eq. 1, and their code: ``sum_i (1 - C_ii)^2 + lambda sum_i!=j C_ij^2``, where C is the
cross-correlation over the global batch of the two views' projections, standardised in each dimension.
"""

from typing import Any

from torch import Tensor, nn

from cocor.methods.base import Decorrelating, Ranks, feature_size, product_norm, three_layer_head

BIAS_SHARE = 0.0048 / 0.2  # of the rate, for biases and BatchNorm: the authors' two rates


class BarlowTwins(Decorrelating):
    """Barlow Twins on ``backbone``: a projector of three linear layers.

    CoCor embeds originals and composites by encoder and projector, standardised by the pass's own statistics as in the
    loss, which ignores mean and scale (the paper does not report Barlow Twins). The original has no gradient, though
    the loss has one through both of its views: the original is what its composites' distances are measured from, and
    must not come to meet them.
    """

    # The authors' settings, the rate for a batch of 256 (theirs, 2,048, has 1.6). Views as BYOL's.
    defaults = {
        "optimiser": "lars", "lr": 0.2, "final_lr": 1e-3, "weight_decay": 1e-6, "decay_biases": False,
        "warmup_epochs": 10, "sync_bn": True, "embedding_dim": 8192, "projector_dim": 8192,
        "crop_scale_min": 0.08, "saturation": 0.2, "blur_prob": (1.0, 0.1), "solarize_prob": (0.0, 0.2),
    }  # fmt: skip
    options = ("embedding_dim", "projector_dim", "redundancy_weight")
    cost = 6

    def __init__(self, backbone: nn.Module, ranks: Ranks = Ranks(), *, embedding_dim: int = 8192,
                 projector_dim: int = 8192, redundancy_weight: float = 0.0051) -> None:  # fmt: skip
        super().__init__(backbone, ranks)
        self.projector = three_layer_head(feature_size(backbone), projector_dim, embedding_dim)
        self.projector.append(nn.BatchNorm1d(embedding_dim, affine=False))
        self.redundancy_weight = redundancy_weight

    def parameter_groups(self, weight_decay: float) -> list[dict[str, Any]]:
        """Group biases and BatchNorm's parameters apart, with a share of the rate."""
        (group,) = super().parameter_groups(weight_decay)
        weights, others = ([p for p in group["params"] if (p.ndim > 1) == large] for large in (True, False))
        return [group | {"params": weights}, group | {"params": others, "lr_share": BIAS_SHARE}]

    def criterion(self, first: Tensor, second: Tensor) -> Tensor:
        return redundancy_reduction(first, second, self.redundancy_weight)


def redundancy_reduction(first: Tensor, second: Tensor, weight: float) -> Tensor:
    """Compute the loss of standardised views (N, d) with ``weight`` lambda."""
    count = len(first)
    own = (first * second).sum(0) / count
    return (own - 1.0).square().sum() + weight * (product_norm(first, second) / count**2 - own.square().sum())
