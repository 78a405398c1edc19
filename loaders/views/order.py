"""Sample order: a pure function of (seed, epoch), cut into batches and ranks.

The order does not depend on the number of ranks: rank r of R takes the r-th part of each *global* batch. So a run may
stop on four GPUs and go on with two and sees the same samples. A loader's position is two integers, epoch and step.
"""

from collections.abc import Iterator
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from loaders.errors import UserError
from loaders.views import philox

# Streams are shared with the view plan's draws; this one is out of reach of any crop or view.
_ORDER_STREAM = 0xFFFFFFFF
MOST_STAND_INS = 100
"""How many samples are tried in the place of an unusable one."""


@lru_cache(maxsize=4)
def permutation(seed: int, epoch: int, length: int) -> npt.NDArray[np.int64]:
    """Order the samples of epoch ``epoch``: int64 (length,), read-only."""
    order = np.argsort(philox.sort_keys(seed, epoch, length, _ORDER_STREAM), kind="stable").astype(np.int64)
    order.setflags(write=False)
    return order


class BatchOrder:
    """Which samples each rank sees at each step.

    ``batch_size`` is global. With ``drop_last`` the tail that fills no batch is left out (another one each epoch when
    shuffled), so every rank makes the same number of equal steps; without, the last batch is shorter.
    """

    def __init__(
        self, length: int, batch_size: int, *, seed: int = 0, rank: int = 0, world_size: int = 1,
        shuffle: bool = True, drop_last: bool = True,
    ) -> None:  # fmt: skip
        if batch_size < 1 or batch_size % world_size:
            raise UserError(f"--batch-size {batch_size} must be a positive multiple of the {world_size} ranks")
        if length < 1 or (drop_last and length < batch_size):
            raise UserError(
                f"{length} images are fewer than one batch; lower --batch-size ({batch_size}) or add images"
            )
        self.length, self.batch_size, self.seed = length, batch_size, seed
        self.rank, self.world_size, self.shuffle, self.drop_last = rank, world_size, shuffle, drop_last

    @property
    def steps(self) -> int:
        """Return the steps in an epoch, the same on every rank."""
        full, tail = divmod(self.length, self.batch_size)
        return full if self.drop_last else full + bool(tail)

    @property
    def local_batch_size(self) -> int:
        """Return the largest number of samples in one of this rank's batches."""
        return self.batch_size // self.world_size

    def global_batch(self, epoch: int, step: int) -> npt.NDArray[np.int64]:
        """Return all ranks' samples at ``step``: int64 (batch_size,), or fewer in a tail."""
        chosen = slice(step * self.batch_size, (step + 1) * self.batch_size)
        return self._epoch(epoch)[chosen]

    def indices(self, epoch: int, step: int) -> npt.NDArray[np.int64]:
        """Return this rank's samples at ``step``: int64 (batch_size / world_size,)."""
        return self._share(self.global_batch(epoch, step))

    def passes(self, epoch: int, step: int) -> npt.NDArray[np.int64]:
        """Return each sample's pass over the data: the epoch its views are drawn for."""
        return np.full(len(self.indices(epoch, step)), epoch, np.int64)

    def stand_ins(self, epoch: int, step: int, place: int) -> Iterator[tuple[int, int]]:
        """Yield (sample, pass) of those that may replace the one at ``place``.

        The first is at the same place of the next global batch, then come those behind it, and after the epoch's end
        those at its start. They are the same on any number of ranks.
        """
        everyone = len(self.global_batch(epoch, step))
        place += self.rank * everyone // self.world_size
        for distance in range(min(2 * self.length, MOST_STAND_INS)):  # two passes, as one may begin in its middle
            yield self._sample(epoch, (step + 1) * self.batch_size + place + distance)

    def _sample(self, epoch: int, place: int) -> tuple[int, int]:
        """Return (sample, pass) at a place of an epoch that wraps around."""
        return int(self._epoch(epoch)[place % self.length]), epoch

    def _epoch(self, epoch: int) -> npt.NDArray[np.int64]:
        return permutation(self.seed, epoch, self.length) if self.shuffle else np.arange(self.length, dtype=np.int64)

    def _share(self, everyone: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        count = len(everyone)
        return everyone[self.rank * count // self.world_size : (self.rank + 1) * count // self.world_size]


class CyclicOrder(BatchOrder):
    """Pass after pass over a small data set, in epochs of another's ``steps``.

    The labelled images of the MMNN are fewer than a step or an epoch needs; here a batch may span several passes, and
    a sample's views are drawn anew in each.
    """

    def __init__(
        self, length: int, batch_size: int, *, steps: int, seed: int = 0, rank: int = 0, world_size: int = 1
    ) -> None:
        super().__init__(length, batch_size, seed=seed, rank=rank, world_size=world_size, drop_last=False)
        self._steps = steps

    @property
    def steps(self) -> int:
        return self._steps

    def global_batch(self, epoch: int, step: int) -> npt.NDArray[np.int64]:
        places = self._places(epoch, step)
        number, within = np.divmod(places, self.length)
        index = np.empty_like(places)
        for one in np.unique(number):
            chosen = number == one
            index[chosen] = permutation(self.seed, int(one), self.length)[within[chosen]]
        return index

    def passes(self, epoch: int, step: int) -> npt.NDArray[np.int64]:
        return self._share(self._places(epoch, step) // self.length)

    def _sample(self, epoch: int, place: int) -> tuple[int, int]:
        number, within = divmod(epoch * self._steps * self.batch_size + place, self.length)
        return int(permutation(self.seed, number, self.length)[within]), number

    def _places(self, epoch: int, step: int) -> npt.NDArray[np.int64]:
        start = (epoch * self._steps + step) * self.batch_size
        return np.arange(start, start + self.batch_size, dtype=np.int64)
