"""VICReg: views agree, dimensions keep their variance and do not covary.

Source: Bardes et al. 2022, eq. 1 to 6, averaged as in their code: over N views of the global batch in d dimensions,

    invariance   mean of (z - z')^2 over N d (eq. 5 divides by N alone)
    variance     mean over dimensions of max(0, 1 - sqrt(var + 1e-4)), halved and summed over the views (eq. 1 and 6 do
                 not halve)
    covariance   sum over i != j of cov_ij^2 / d, summed over the views

with the weights 25, 25 and 1. Expander and views are theirs.
"""

from torch import Tensor, nn
from torch.nn import functional as F

from cocor.methods.base import Decorrelating, Ranks, feature_size, product_norm, three_layer_head


class VICReg(Decorrelating):
    """VICReg on ``backbone``: an expander (here ``projector``) of three linear layers.

    CoCor embeds originals and composites by encoder and expander (the paper does not report VICReg). The original has
    no gradient, though the loss has one through both of its views: the original is what its composites' distances are
    measured from, and must not come to meet them.
    """

    # The authors' settings, the rate for a batch of 256 (theirs, 2,048, has 1.6). Views as BYOL's.
    defaults = {
        "optimiser": "lars", "lr": 0.2, "final_lr": 1e-3, "weight_decay": 1e-6, "decay_biases": False,
        "warmup_epochs": 10, "sync_bn": True, "embedding_dim": 8192, "projector_dim": 8192,
        "crop_scale_min": 0.08, "saturation": 0.2, "blur_prob": (1.0, 0.1), "solarize_prob": (0.0, 0.2),
    }  # fmt: skip
    options = ("embedding_dim", "projector_dim", "invariance_weight", "variance_weight", "covariance_weight")
    cost = 6

    def __init__(self, backbone: nn.Module, ranks: Ranks = Ranks(), *, embedding_dim: int = 8192,
                 projector_dim: int = 8192, invariance_weight: float = 25.0, variance_weight: float = 25.0,
                 covariance_weight: float = 1.0) -> None:  # fmt: skip
        super().__init__(backbone, ranks)
        self.projector = three_layer_head(feature_size(backbone), projector_dim, embedding_dim, hidden_bias=True)
        self.weights = invariance_weight, variance_weight, covariance_weight

    def criterion(self, first: Tensor, second: Tensor) -> Tensor:
        return variance_invariance_covariance(first, second, self.weights)


def variance_invariance_covariance(first: Tensor, second: Tensor, weights: tuple[float, float, float]) -> Tensor:
    """Compute eq. 6 for views (N, d), with the weights of its three terms."""
    variance = covariance = first.new_zeros(())
    for view in (first, second):
        centred = view - view.mean(0)
        own = centred.square().sum(0) / (len(view) - 1)
        variance = variance + F.relu(1.0 - (own + 1e-4).sqrt()).mean() / 2
        among = product_norm(centred, centred) / (len(view) - 1) ** 2 - own.square().sum()
        covariance = covariance + among / view.shape[1]
    return weights[0] * F.mse_loss(first, second) + weights[1] * variance + weights[2] * covariance
