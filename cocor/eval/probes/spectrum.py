"""Measure the dimensions that an encoder uses (paper, figure "post-hoc" b).

Collapse shows as singular values that fall to zero. Two numbers summarise the curve: the effective rank, which is the
exponential of the entropy of the normalised singular values (Roy & Vetterli 2007), and how many principal components
hold 90 % of the variance.
"""

from dataclasses import dataclass

import torch
from torch.nn import functional as F

from cocor.eval.features import Features
from loaders.errors import UserError


@dataclass(frozen=True)
class Spectrum:
    """Roots of the covariance's eigenvalues, in descending order, and their summary."""

    name: str
    singular_values: tuple[float, ...]
    effective_rank: float
    components_90: int
    images: int

    def lines(self) -> list[str]:
        """Format the report for people."""
        return [
            f"{self.name}: effective rank {self.effective_rank:.1f} of {len(self.singular_values)}, "
            f"90 % of the variance in {self.components_90} components, {self.images:,} images"
        ]


def spectrum(name: str, features: Features, *, normalise: bool = True) -> Spectrum:
    """Compute the spectrum of features (N, D), of unit length if ``normalise``.

    Raises:
        UserError: fewer than two images.
    """
    if len(features) < 2:
        raise UserError("a spectrum needs two images or more")
    values = features.values.flatten(0, -2).double()
    if normalise:
        values = F.normalize(values, dim=1)
    centred = values - values.mean(0)
    variances = torch.linalg.eigvalsh(centred.T @ centred / len(centred)).flip(0).clamp(min=0)
    singular = variances.sqrt()
    total = singular.sum()
    shares = singular / total if total > 0 else singular
    entropy = -torch.special.xlogy(shares, shares).sum()
    cumulated = variances.cumsum(0)
    components = int((cumulated < 0.9 * cumulated[-1]).sum()) + 1 if total > 0 else 0
    rank = entropy.exp().item() if total > 0 else 0.0
    return Spectrum(name, tuple(singular.tolist()), rank, components, len(features))
