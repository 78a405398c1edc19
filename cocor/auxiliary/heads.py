"""Networks on top of features, and losses that several auxiliaries share."""

import math
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cocor.methods.base import Ranks, joined, normalised


def perceptron(*widths: int, last_norm: bool = False) -> nn.Sequential:
    """Build linear layers with BatchNorm and ReLU in between.

    They map (N, first of ``widths``) to (N, last). ``last_norm`` adds a BatchNorm without weights behind the last one,
    which then has no bias.
    """
    layers: list[nn.Module] = []
    for width, following in pairwise(widths[:-1]):
        layers += [nn.Linear(width, following, bias=False), nn.BatchNorm1d(following), nn.ReLU(inplace=True)]
    layers.append(nn.Linear(widths[-2], widths[-1], bias=not last_norm))
    if last_norm:
        layers.append(nn.BatchNorm1d(widths[-1], affine=False))
    return nn.Sequential(*layers)


def log_mean_exp(values: Tensor, ranks: Ranks) -> Tensor:
    """Compute ``log(mean(exp(values)))`` over all elements of all ranks, a scalar."""
    return joined(values.flatten().logsumexp(0)[None], ranks).logsumexp(0) - math.log(values.numel() * ranks.size)


def nt_xent(first: Tensor, second: Tensor, temperature: float, ranks: Ranks, counts: Tensor | None = None) -> Tensor:
    """Compute SimCLR's NT-Xent of pairs (B, d), against all others of all ranks.

    Source: Chen et al. 2020, eq. 1, averaged over both directions. Every rank computes the loss of the global batch.
    Pairs whose ``counts`` (ranks * B,) is false are negatives only; without any other the loss is 0.
    """
    with torch.autocast(first.device.type, enabled=False):
        whole = torch.cat([joined(normalised(part), ranks) for part in (first, second)])
        logits = whole @ whole.T / temperature
        logits = logits.masked_fill(torch.eye(len(whole), dtype=torch.bool, device=whole.device), -torch.inf)
        partner = torch.arange(len(whole), device=whole.device).roll(len(whole) // 2)
        if counts is None:
            return F.cross_entropy(logits, partner)
        both = counts.repeat(2).to(logits.dtype)
        return (F.cross_entropy(logits, partner, reduction="none") * both).sum() / both.sum().clamp_min(1.0)
