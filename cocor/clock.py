"""Where the time of a loop goes: waiting for the next item, or working on it."""

import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

import torch

Item = TypeVar("Item")


class Clock:
    """Time spent in a loop over batches, and the part of it spent waiting for the next batch.

    On a GPU, whose host runs ahead, the wait is the time in which the device had nothing but the loader's work to do,
    measured by CUDA events around the fetch.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._seconds = self._waited = 0.0
        self._since: float | None = None
        self._fetches: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def timed(self, batches: Iterable[Item]) -> Iterator[Item]:
        """Yield ``batches``; the clock runs until the iterator is exhausted or closed."""
        iterator = iter(batches)
        self._since = time.perf_counter()
        try:
            while True:
                try:
                    item = self._fetch(iterator)
                except StopIteration:
                    return
                yield item
        finally:
            self._seconds += time.perf_counter() - self._since
            self._since = None
            if hasattr(iterator, "close"):
                iterator.close()

    def _fetch(self, iterator: Iterator[Item]) -> Item:
        if self.device.type != "cuda":
            begin = time.perf_counter()
            item = next(iterator)
            self._waited += time.perf_counter() - begin
            return item
        idle, busy = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        idle.record()
        item = next(iterator)
        busy.record()
        self._fetches.append((idle, busy))
        return item

    def read(self) -> tuple[float, float]:
        """(seconds, seconds waited) since the last reading. The device must have finished what was queued by then."""
        now = time.perf_counter()
        seconds, waited = self._seconds, self._waited
        if self._since is not None:
            seconds, self._since = seconds + now - self._since, now
        waited += sum(idle.elapsed_time(busy) for idle, busy in self._fetches) / 1000
        self._seconds, self._waited, self._fetches = 0.0, 0.0, []
        return seconds, waited
