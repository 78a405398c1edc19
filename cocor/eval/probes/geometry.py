"""Judge features by how they lie on the sphere and in space, without labels.

Alignment and uniformity fall as features get better at what contrastive losses ask for; RankMe falls as they collapse.
"""

import torch
from torch import Tensor
from torch.nn import functional as F


def alignment(pairs: Tensor) -> float:
    """Return the mean squared distance of pairs (2, P, D), normalised.

    Wang & Isola 2020, section 4.1, with an exponent of 2.
    """
    first, second = F.normalize(pairs, dim=-1)
    return (first - second).square().sum(1).mean().item()


def uniformity(features: Tensor) -> float:
    """Return log mean exp(-2 d^2) over pairs of features (N, D), normalised.

    Wang & Isola 2020, section 4.1, with t = 2.
    """
    return torch.pdist(F.normalize(features, dim=1)).square().mul(-2).exp().mean().log().item()


def rankme(features: Tensor) -> float:
    """Return RankMe of features (N, D), an effective rank from 1 to D.

    Garrido et al. 2023, eq. 1 and 2: the exponential of the entropy of the singular values' shares of their sum;
    features are neither centred nor normalised.
    """
    values = features.double()
    values = values.T if len(values) < values.shape[1] else values
    singular = torch.linalg.eigvalsh(values.T @ values).clamp(min=0).sqrt()
    shares = singular / singular.sum() + 1e-7
    return shares.log().mul(-shares).sum().exp().item()
