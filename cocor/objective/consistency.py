"""Compute latent similarity and the consistency losses, as pure functions.

Paper, eq. 2 (``abs_loss``) and appendix "Improving CoCor with an Alternative Consistency Loss" (``softplus_loss``).
A loss returns its value together with the two derivatives that the bi-level step needs
(``cocor.objective.hypergradient``), each already multiplied by the loss's ``weight``.

Batch means are means over the global batch: ``mean_over_ranks`` averages a detached tensor over all ranks, each of
which holds equally many samples. The value of a loss is then the global one, and its gradient is such that averaging
the gradients of all ranks, as data-parallel training does, gives the gradient of the global loss.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from cocor.methods.base import identity, normalised

MeanOverRanks = Callable[[Tensor], Tensor]
Sign = Literal["text", "printed"]


@dataclass(frozen=True)
class Consistency:
    """A weighted consistency loss and its derivatives, one per length or per sample.

    ``slope`` is the derivative of the loss with respect to this rank's similarities, as if its share were the whole
    batch (averaging over ranks makes up for that, see the module): to the mean similarity of each length (L,) for the
    softplus loss, to every single similarity (L, B) for the abs loss. ``curvature``, of the same shape, is minus the
    derivative of ``slope`` with respect to the target of that length or sample, hence never negative.
    """

    loss: Tensor  # scalar; its gradient reaches the similarities, never the targets
    unweighted: Tensor  # scalar, detached
    similarity: Tensor  # (L,) mean over the global batch, detached
    target: Tensor  # (L,) mean over the global batch, detached
    slope: Tensor
    curvature: Tensor
    compared: Tensor  # what targets are compared with, detached: mean similarities (L,), or all of them (L, B)


def latent_similarity(composites: Tensor, originals: Tensor) -> Tensor:
    """Compute cosines of composites with their originals, which get no gradient.

    ``composites`` (L, B, d), ``originals`` (B, d), in any floating type -> (L, B) in at least float32.
    """
    return (normalised(composites) * normalised(originals.detach())).sum(-1)


def softplus_loss(similarity: Tensor, target: Tensor, *, weight: float = 1.0, beta: float = 1.0, sign: Sign = "text",
                  mean_over_ranks: MeanOverRanks = identity) -> Consistency:  # fmt: skip
    """Compute ``weight`` times the mean over lengths of ``softplus(beta k_l) / beta``.

    There ``k_l = mean_i target - mean_i similarity``. ``similarity`` and ``target`` are (L, B). The sign of ``k_l`` is
    that of the paper's text and figures (views more similar than their target are hardly pushed apart); with ``sign``
    "printed" it is the opposite, as in eq. "consist_loss_alt", which pushes views away from their original. ``beta`` 1
    is the printed formula, whose pull depends little on the target; a larger one stops once the target is reached.
    """
    direction = 1.0 if sign == "text" else -1.0
    weights = _weights(similarity)
    local = similarity.mean(1)
    means = mean_over_ranks(torch.stack([local.detach(), target.detach().mean(1)]))
    gap = direction * beta * (means[1] - means[0])
    slope = -direction * weight * weights * torch.sigmoid(gap)
    curvature = weight * (weights * beta * torch.sigmoid(gap) * torch.sigmoid(-gap))
    value = (weights * F.softplus(gap) / beta).sum()
    loss = weight * value + _carrier(slope, local)
    return Consistency(loss, value, means[0], means[1], slope, curvature, compared=means[0])


def pull_loss(similarity: Tensor, target: Tensor, *, weight: float = 1.0,
              mean_over_ranks: MeanOverRanks = identity) -> Consistency:  # fmt: skip
    """Compute ``weight`` times half the mean of ``1 - similarity``: no target at all.

    The control of the paper's claim that targets matter. Half, as is the softplus loss's slope where similarities meet
    their targets. Shapes as in ``softplus_loss``; ``target`` is only reported.
    """
    weights = _weights(similarity)
    local = similarity.mean(1)
    means = mean_over_ranks(torch.stack([local.detach(), target.detach().mean(1)]))
    slope = -0.5 * weight * weights
    value = 0.5 * (weights * (1 - means[0])).sum()
    loss = weight * value + _carrier(slope, local)
    return Consistency(loss, value, means[0], means[1], slope, torch.zeros_like(slope), compared=means[0])


def abs_loss(similarity: Tensor, target: Tensor, *, weight: float = 1.0, epsilon: float = 0.05,
             mean_over_ranks: MeanOverRanks = identity) -> Consistency:  # fmt: skip
    """Compute ``weight`` times the mean of ``phi(similarity - target)``.

    That is the paper's eq. 2 with a smoothed absolute value. ``phi(r) = sqrt(r^2 + epsilon^2) - epsilon`` (pseudo-Huber
    of unit slope). The absolute value itself, ``epsilon`` 0, has no curvature, so that a bi-level step would never move
    the MMNN. Shapes as in ``softplus_loss``.
    """
    weights = _weights(similarity)
    residual = similarity.detach() - target.detach()
    share = weights[:, None] / similarity.shape[1]
    root = (residual.square() + epsilon**2).sqrt()
    if epsilon > 0:
        slope, curvature = share * residual / root, share * epsilon**2 / root**3
    else:
        slope, curvature = share * residual.sign(), torch.zeros_like(residual)
    means = mean_over_ranks(torch.stack([similarity.detach().mean(1), target.detach().mean(1), root.mean(1) - epsilon]))
    slope, curvature = weight * slope, weight * curvature
    value = (weights * means[2]).sum()
    loss = weight * value + _carrier(slope, similarity)
    return Consistency(loss, value, means[0], means[1], slope, curvature, compared=similarity.detach())


def _weights(similarity: Tensor) -> Tensor:
    lengths = similarity.shape[0]
    return similarity.new_full((lengths,), 1.0 / lengths)


def _carrier(slope: Tensor, local: Tensor) -> Tensor:
    """Return a zero with gradient ``slope``, that of this rank for a global value."""
    return (slope * (local - local.detach())).sum()
