"""Comparison of a stopped and resumed run with an unbroken one, and with the noise between two unbroken runs.

On the CPU all are equal to the bit. On a GPU sums are made in another order each time; a resumed run must not differ by
more than that. Distances are those of all weights, moments and queues, relative to their norm.
"""

import signal
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from soak import runs
from soak.runs import Lane, Start, wait_until
from torch import Tensor

_SIGNAL_AFTER = runs.IMAGES // runs.BATCH + 2  # steps


def compare(lane: Lane) -> tuple[float, float]:
    """Train ``lane`` twice unbroken and once resumed: distance of the two, and of the resumed one from the first."""
    names = ("one", "two", "resumed")
    lane.folder.mkdir()
    one, two, broken = (replace(lane, folder=lane.folder / name) for name in names)
    with ExitStack() as stack:

        def start(run: Lane, *more: str) -> Start:
            process = runs.start(run, *more)
            stack.callback(runs.end, process, run)
            return process

        unbroken = [start(run) for run in (one, two)]
        process = start(broken)
        wait_until(lambda: len(runs.samples(broken.folder)) >= _SIGNAL_AFTER, "no step is made", runs.MORE_PATIENCE)
        runs.send(process.pid, signal.SIGTERM)
        process.expect({75}, patience=runs.MORE_PATIENCE)
        assert process.code == 75
        for process in (start(broken, "--resume"), *unbroken):
            process.expect({0}, patience=runs.MORE_PATIENCE)
    first, second, third = (runs.outcome(run.folder) for run in (one, two, broken))
    assert third[0] == first[0]  # the same samples
    return distance(first[1], second[1]), distance(first[1], third[1])


def distance(left: dict[str, Any], right: dict[str, Any]) -> float:
    """Norm of the difference of all floating-point tensors, relative to that of ``left``. The rest must be equal."""
    assert left.keys() == right.keys()
    apart = whole = 0.0
    for name, value in left.items():
        if isinstance(value, Tensor) and value.is_floating_point():
            apart += float((right[name].double() - value.double()).square().sum())
            whole += float(value.double().square().sum())
        else:
            assert runs.same(value, right[name]), name
    return float((apart / whole) ** 0.5)
