"""Differentiate the labelled loss by the MMNN, through a step of the encoder.

Paper, appendix "Derivation of the Update Rule of the MMNN". With the encoder's step ``theta' = theta - eta grad L`` and
a consistency loss of curvature ``c`` (``cocor.objective.consistency``: minus its second derivative by similarity and
target),

    dCE(theta')/d theta_d  =  eta * sum_l c_l <grad CE(theta'), grad sim_l(theta)> * d mean_i g(v_i^l) / d theta_d

and likewise per sample for the abs loss. Momentum and weight decay do not depend on the MMNN within the step, so the
formula is exact for SGD with both. Other optimisers' steps, and clipped gradients, have another derivative than eta, by
which grad CE is multiplied first (``cocor.step.derivative``): exact for AdamW and clipping, but for LARS without the
derivative of each weight's trust ratio, which was 12 to 15 % off in a small network. It needs L inner products, where
the paper's approximation (``taylor``) needs the contrastive loss, the similarities and the cross-entropy a second time.

``exact``, ``taylor`` and ``released`` return a surrogate: a scalar whose backward pass puts this gradient into the
MMNN, and nothing anywhere else.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from cocor.methods.base import Method
from cocor.objective.consistency import MeanOverRanks, identity, latent_similarity


def inner_products(similarity_gradients: Sequence[Sequence[Tensor]], ce_gradient: Sequence[Tensor],
                   mean_over_ranks: MeanOverRanks = identity) -> Tensor:  # fmt: skip
    """Compute ``<grad CE, grad sim_l>`` of every length: (L,).

    ``similarity_gradients[l][p]`` is the gradient of this rank's mean similarity of length l with respect to parameter
    p, at the weights before the step; ``ce_gradient[p]`` that of the cross-entropy after it, averaged over ranks.
    Parameters that the cross-entropy does not depend on (heads) are left out of both. As the product is linear, local
    similarity gradients are enough: ``mean_over_ranks`` averages L numbers.
    """
    products = []
    for gradients in similarity_gradients:
        shares = torch._foreach_mul(list(gradients), list(ce_gradient))
        # The results are dense in memory, in whatever order; as flat views they need one sum instead of hundreds.
        flat = [share.as_strided((share.numel(),), (1,)) for share in shares]
        products.append(torch.cat(flat).sum())
    return mean_over_ranks(torch.stack(products))


def exact(target: Tensor, curvature: Tensor, products: Tensor, learning_rate: float | Tensor) -> Tensor:
    """Return a surrogate, whose backward pass gives the MMNN its exact hyper-gradient.

    ``target`` (L, B) is the MMNN's output with its graph. ``curvature`` and ``products`` are both (L,), from
    ``softplus_loss`` and ``inner_products``, or both (L, B), from ``abs_loss`` and ``sample_inner_products``.
    ``learning_rate`` is the encoder's in this step, times (1 + momentum) under Nesterov. On several ranks the caller
    averages the MMNN's gradients over ranks.
    """
    return _surrogate(target, learning_rate * curvature * products)


@dataclass(frozen=True)
class Measured:
    """What ``taylor`` compares before and after the step, of the global batch."""

    loss: Tensor  # (): contrastive plus consistency loss
    cross_entropy: Tensor  # ()
    similarity: Tensor  # (L,) means for the softplus loss, this rank's (L, B) for the abs loss


def taylor(target: Tensor, curvature: Tensor, before: Measured, after: Measured, floor: float = 1e-4) -> Tensor:
    """Return the paper's eq. 12, its sign mended, as a surrogate.

    It is ``-dCE * sum_l c_l (d sim_l / dL) * mean_i g``. Eq. 6 loses a minus between its lines, which eq. 12 inherits.
    ``dL``, negative in a step that lowers the loss, is kept at least ``floor`` away from zero without changing its
    sign. Shapes as in ``exact``; the curvature is the one before the step.
    """
    loss_change = (after.loss - before.loss).detach()
    loss_change = torch.where(loss_change > 0, loss_change.clamp_min(floor), loss_change.clamp_max(-floor))
    ce_change = (after.cross_entropy - before.cross_entropy).detach()
    similarity_change = (after.similarity - before.similarity).detach()
    return _surrogate(target, -curvature * ce_change * similarity_change / loss_change)


def released(target: Tensor, curvature: Tensor, before: Measured, after: Measured) -> Tensor:
    """Return the update of the authors' code, for comparison, as a surrogate.

    It is eq. 12 as printed, hence with the opposite sign of ``taylor``, and with the curvature at the weights *after*
    the step. Shapes as in ``exact``. Two side effects of their code are left out: per step it updates the moving
    average and fills the queue twice.
    """
    return -taylor(target, curvature, before, after)


def sample_inner_products(method: Method, composites: Tensor, originals: Tensor, direction: Mapping[str, Tensor],
                          parameters: Mapping[str, Tensor] | None = None) -> Tensor:  # fmt: skip
    """Compute ``<grad CE, grad sim_i>`` of all composites, (L, B), for the abs loss.

    One forward-mode derivative (JVP) of the similarities along ``direction``, the averaged gradient of the
    cross-entropy by parameter name of ``method``. It stores no activations, but takes the time of about nine forward
    passes (ResNet-50 on an H100, bf16), because BatchNorm's derivative is not fused. ``composites`` (L, B, C, H, W),
    ``originals`` (B, d) embeddings. ``parameters`` holds the weights before the step by name, for a module that has
    taken the step already; others are taken from the module. Synchronised BatchNorm has no such derivative
    (``cocor.config.checks`` refuses it).
    """
    embed = _Composites(method)
    weights_before = dict(method.named_parameters()) | dict(parameters or {})
    fixed = {f"method.{name}": value.detach() for name, value in weights_before.items() if name not in direction}
    primal = {f"method.{name}": weights_before[name].detach() for name in direction}
    tangent = {f"method.{name}": value for name, value in direction.items()}

    def similarity(weights: dict[str, Tensor], images: Tensor) -> Tensor:
        features = torch.func.functional_call(embed, fixed | weights, (images,))
        return latent_similarity(features[None], originals)[0]

    rows = []
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):  # fused attention has no forward-mode derivative
        for images in composites:
            rows.append(torch.func.jvp(lambda weights, x=images: similarity(weights, x), (primal,), (tangent,))[1])
    return torch.stack(rows)


class _Composites(nn.Module):
    """Give ``functional_call`` a ``forward`` that is ``embed_composite``."""

    def __init__(self, method: Method) -> None:
        super().__init__()
        self.method = method

    def forward(self, images: Tensor) -> Tensor:
        return self.method.embed_composite(images)


def _surrogate(target: Tensor, coefficient: Tensor) -> Tensor:
    """Return a scalar whose derivative by targets (L, B) or their means is given."""
    coefficient = coefficient.detach()
    return (coefficient * (target.mean(1) if coefficient.ndim == 1 else target)).sum()
