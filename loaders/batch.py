"""The contract of the data side: a :class:`Batch`, from any :class:`Loader`."""

from collections.abc import Generator
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """One rank's share of a step: V contrastive views, O originals, L composites.

    Images of its B samples are normalised, channels-last, in the compute dtype, on the training device. They have C = 3
    channels, or 1, their luma:

    - ``views`` (V, B, C, H, W): the contrastive views.
    - ``original`` (O*B, C, H, W), view-major: what the consistency loss compares with. O is 1 except in the
      ``released`` recipe, which averages the embeddings of several weak crops.
    - ``composites`` (L, B, C, H, W): one composite view a length, in the order of the plan's lengths.
    - ``composition`` (L, B, 14) uint8: how often each basic augmentation of :mod:`loaders.views.ops` was applied.
    - ``label`` (B,) int64, -1 where there is none; ``index`` (B,) int64, the sample's place in the data set.
    - ``parameters`` (V, B, 16) float32: what was done to each contrastive view, the numbers of
      :data:`loaders.views.parameters.PARAMETERS`; None unless the plan asks for them.
    - ``kept`` (N, B, C, H, W): further views with a part of the first contrastive one; None unless the plan has some.
    """

    views: Tensor
    original: Tensor
    composites: Tensor
    composition: Tensor
    label: Tensor
    index: Tensor
    parameters: Tensor | None = None
    kept: Tensor | None = None


class Loader(Protocol):
    """A source of batches. Its position is (epoch, step); it holds no random state."""

    @property
    def steps_per_epoch(self) -> int: ...

    def epoch(self, e: int, start_step: int = 0) -> Generator[Batch, None, None]:
        """Yield the batches of epoch ``e`` from ``start_step`` on; may be left early."""
        ...

    def epochs(self, epochs: range, start_step: int = 0) -> Generator[Batch, None, None]:
        """Yield the batches of several epochs without a pause between them."""
        ...

    def close(self) -> None:
        """Release threads, processes and memory. Calling it twice is allowed."""
        ...
