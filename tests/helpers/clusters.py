"""Features without images: clusters that a linear probe can tell apart, more or less."""

import torch

from cocor.eval.features import Features


def clusters(count: int, seed: int, dim: int = 24, classes: int = 6, spread: float = 1.0) -> Features:
    """``count`` points around ``classes`` centres, which are the same for every seed."""
    centres = torch.randn(classes, dim, generator=torch.Generator().manual_seed(77))
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes, (count,), generator=generator)
    return Features(0.5 * centres[labels] + spread * torch.randn(count, dim, generator=generator), labels)
