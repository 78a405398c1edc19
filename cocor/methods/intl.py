"""INTL: iterative normalisation whitens a batch, a trace loss equalises the rest.

Source: Weng et al. 2023 ("Modulate Your Spectrum in Self-Supervised Learning") and its authors' code in the default
setting, "channel whitening": an embedding is centred over its own d values, and the N embeddings of the batch are
whitened among each other, which takes N < d. Four Newton steps leave eigenvalues below 1; the trace loss pulls every
image's variance to 1. The projector has three linear layers. The CoCor paper reports results with INTL, but not where
its loss attaches: here to the projector's output, before whitening, of composites and (without gradient) originals.
"""

import math

import torch
from torch import Tensor, nn

from cocor.methods.base import Config, Method, Ranks, feature_size, joined, normalised, precise, three_layer_head
from loaders.errors import UserError


class INTL(Method):
    """INTL on ``backbone``: a projector of three linear layers.

    ``trace_weight`` None is the authors' ``0.01 (log2(N) - 3)`` for a global batch of N.
    """

    # Views as BYOL's, and the authors' rate.
    defaults = {
        "lr": 0.5, "final_lr": 1e-3, "weight_decay": 1e-5, "decay_biases": False, "warmup_epochs": 2,
        "sync_bn": True, "embedding_dim": 8192, "projector_dim": 8192,
        "crop_scale_min": 0.08, "saturation": 0.2, "blur_prob": (1.0, 0.1), "solarize_prob": (0.0, 0.2),
    }  # fmt: skip
    options = ("embedding_dim", "projector_dim", "whitening_iterations", "trace_weight")
    cost = 6

    def __init__(self, backbone: nn.Module, ranks: Ranks = Ranks(), *, embedding_dim: int = 8192,
                 projector_dim: int = 8192, whitening_iterations: int = 4,
                 trace_weight: float | None = None) -> None:  # fmt: skip
        super().__init__(backbone, ranks)
        self.projector = three_layer_head(feature_size(backbone), projector_dim, embedding_dim, last_bias=True)
        self.iterations, self.trace_weight = whitening_iterations, trace_weight

    @classmethod
    def check(cls, config: Config, ranks: int) -> None:
        if config.batch_size >= config.embedding_dim:
            least = f"batch_size: {config.batch_size}, as INTL whitens the images of a batch among each other"
            raise UserError(f"embedding_dim: {config.embedding_dim} must be more than {least}; raise or lower one")

    def loss_of(self, views: Tensor, labels: Tensor | None) -> tuple[Tensor, Tensor]:
        """Compute the loss; also return the embeddings of the first view."""
        embeddings = [self.projector(self.features(images)) for images in views]
        # In float64: GPUs round the factors of float32 products (TF32), and Newton's steps magnify that.
        with torch.autocast(views.device.type, enabled=False):
            whole = [joined(precise(part), self.ranks) for part in embeddings]
            weight = self.trace_weight
            if weight is None:
                weight = 0.01 * (math.log2(len(whole[0])) - 3)
            loss = iterative_normalisation_loss(whole[0].double(), whole[1].double(), self.iterations, weight)
            return loss.to(whole[0].dtype), embeddings[0]

    def encode(self, images: Tensor) -> Tensor:
        """Embed images by backbone and projector."""
        return normalised(self.projector(self.backbone(images)))


def iterative_normalisation_loss(first: Tensor, second: Tensor, iterations: int, trace_weight: float) -> Tensor:
    """Compute ``2 - 2 cos`` of the whitened views (N, d), plus both trace losses."""
    first, second = whitened(first, iterations), whitened(second, iterations)
    distance = 2.0 - 2.0 * (normalised(first) * normalised(second)).sum(1).mean()
    return distance + trace_weight * (trace_loss(first) + trace_loss(second))


def whitened(embeddings: Tensor, iterations: int) -> Tensor:
    """Centre embeddings (N, d) over d, and whiten them over N.

    ``iterations`` Newton steps go towards ``Sigma^(-1/2)``.

    ``Sigma`` (N, N) is their covariance over d, divided by its trace so that the steps converge:
    ``P <- 1.5 P - 0.5 P^3 Sigma`` from the identity.
    """
    centred = embeddings - embeddings.mean(1, keepdim=True)
    covariance = centred @ centred.T / (embeddings.shape[1] - 1)
    trace = covariance.diagonal().sum()
    trace = trace.clamp_min(torch.finfo(trace.dtype).tiny)  # embeddings all alike have no covariance
    covariance = covariance / trace
    root = torch.eye(len(covariance), dtype=covariance.dtype, device=covariance.device)
    for _ in range(iterations):
        root = 1.5 * root - 0.5 * (root @ root @ root) @ covariance
    return (root @ centred) * trace.rsqrt()


def trace_loss(embeddings: Tensor) -> Tensor:
    """Sum ``(variance over d - 1)^2`` over the batch, of (N, d)."""
    return (embeddings.var(1) - 1.0).square().sum()
