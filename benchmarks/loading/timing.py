"""Timing of a stream: windows of completed batches, and CPU time behind them.

A batch counts when the device has finished it; two may be in flight, as in training. Warm-up lies before the first
window. Windows follow one another without a gap: batches that become ready while the CPU time is read must not come for
free. Where several workers each finish a batch at about the same time, windows span whole bursts of that many batches.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from benchmarks.loading import cpu_time

WINDOWS = 3
_FEWEST_BATCHES = 3  # in a window
_WARM_UP = 10  # bursts, where ranks wait for each other
_IN_FLIGHT = 2
_SECONDS_TO_SETTLE = 1.0


@dataclass(frozen=True)
class Window:
    """Consecutive batches: samples, seconds, busy cores, seconds one by one."""

    samples: int
    seconds: float
    cores: float
    intervals: tuple[float, ...]

    @property
    def rate(self) -> float:
        """Return samples a second."""
        return self.samples / self.seconds


def completed(counts: Iterable[int], device: torch.device) -> Iterator[int]:
    """Yield sizes of batches, each once ``device`` has completed it."""
    if device.type != "cuda":
        yield from counts
        return
    flight: deque[tuple[torch.cuda.Event, int]] = deque()
    for count in counts:
        event = torch.cuda.Event(blocking=True)  # a spinning wait would count as a busy core
        event.record()
        flight.append((event, count))
        if len(flight) > _IN_FLIGHT:
            oldest, count = flight.popleft()
            oldest.synchronize()
            yield count


def time_windows(counts: Iterable[int], seconds: float, burst: int = 1, warm_up: int = 2) -> list[Window]:
    """Time the endless ``counts`` for ``seconds``, in up to ``WINDOWS`` windows."""
    stream = iter(counts)
    _warm_up(stream, min(_SECONDS_TO_SETTLE, seconds / 4), max(warm_up, burst), burst)
    watch = _Stopwatch(stream, burst)
    windows: list[Window] = []
    while not windows or (len(windows) < WINDOWS and sum(w.seconds for w in windows) < seconds):
        windows.append(watch.window(seconds / WINDOWS))
    return windows


def time_together(counts: Iterable[int], seconds: float, agree: Callable[[int], int], burst: int = 1) -> list[Window]:
    """Time equally many batches on all ranks; ``agree`` returns rank 0's number."""
    stream = iter(counts)
    for _ in range(_WARM_UP * burst):
        next(stream)
    few = _Stopwatch(stream, burst).window(0.0)
    batches = agree(max(_FEWEST_BATCHES, round(seconds / WINDOWS * len(few.intervals) / few.seconds)))
    for _ in range(-(-(_IN_FLIGHT + 1) // burst) * burst):  # those in flight were finished while the ranks agreed
        next(stream)
    watch = _Stopwatch(stream, burst)
    return [watch.window(0.0, fewest=batches) for _ in range(WINDOWS)]


def _warm_up(stream: Iterator[int], seconds: float, batches: int, burst: int) -> None:
    """Drop batches, and more for ``seconds``: during a slow start they pile up."""
    for _ in range(batches):
        next(stream)
    start = time.perf_counter()
    while time.perf_counter() - start < seconds:
        for _ in range(burst):
            next(stream)


class _Stopwatch:
    """Stopwatch that cuts a stream into windows without gaps."""

    def __init__(self, stream: Iterator[int], burst: int) -> None:
        self._stream, self._burst = stream, burst
        self._last = time.perf_counter()  # when the latest batch was finished
        self._cpu = cpu_time.read()

    def window(self, seconds: float, fewest: int = _FEWEST_BATCHES) -> Window:
        """Time the next ``seconds``, rounded up to bursts and the ``fewest`` batches."""
        start, samples = self._last, 0
        intervals: list[float] = []
        while self._last - start < seconds or len(intervals) < fewest or len(intervals) % self._burst:
            samples += next(self._stream)
            now = time.perf_counter()
            intervals.append(now - self._last)
            self._last = now
        earlier, self._cpu = self._cpu, cpu_time.read()
        return Window(samples, self._last - start, self._cpu.cores_since(earlier), tuple(intervals))


def milliseconds(windows: Iterable[Window], percentile: float) -> float:
    """Take a percentile of the time from one batch to the next."""
    intervals = [interval for window in windows for interval in window.intervals]
    return 1000 * float(np.percentile(intervals, percentile, method="higher"))
