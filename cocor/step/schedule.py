"""Learning-rate schedule: cosine decay per step, after an optional wait at zero and an optional linear warm-up.

The value is a pure function of the step, so that resuming needs no state. The MMNN of the authors' code waits three
epochs and warms up over the next two; the encoder does neither.
"""

import math
from dataclasses import dataclass

from loaders.errors import UserError


@dataclass(frozen=True)
class Cosine:
    """Factor on a base learning rate: 0 for ``wait`` steps, linear warm-up over ``warmup`` steps, cosine to ``final``.

    All lengths are in optimiser steps, which are numbered from 0. The cosine reaches ``final`` at step ``total``, so
    that the last step, ``total - 1``, is still above it.
    """

    total: int
    warmup: int = 0
    wait: int = 0
    final: float = 0.0

    def __post_init__(self) -> None:
        if min(self.total, self.warmup, self.wait) < 0 or self.wait + self.warmup > self.total:
            raise UserError(
                f"schedule: warm-up ends at step {self.wait + self.warmup}, training at step {self.total}; "
                "shorten the warm-up or train for more epochs"
            )

    def __call__(self, step: int) -> float:
        """The factor for optimiser step ``step``."""
        if step < self.wait:
            return 0.0
        step -= self.wait
        if step < self.warmup:
            return (step + 1) / (self.warmup + 1)
        rest = self.total - self.wait - self.warmup
        progress = min(1.0, (step - self.warmup) / rest) if rest else 1.0
        return self.final + (1.0 - self.final) * 0.5 * (1.0 + math.cos(math.pi * progress))
