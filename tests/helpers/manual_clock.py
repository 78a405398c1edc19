"""A clock that tests wind by hand: what is exact must not hang on how busy the machine is."""

from types import ModuleType

import pytest


class HandClock:
    """Stands for the module ``time`` within another module. Sleeping is the only thing that takes time."""

    def __init__(self) -> None:
        self.now = 1000.0

    def perf_counter(self) -> float:
        return self.now

    monotonic = time = perf_counter

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def wound_by_hand(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> HandClock:
    """From now on ``module`` reads the clock returned here."""
    clock = HandClock()
    monkeypatch.setattr(module, "time", clock)
    return clock
