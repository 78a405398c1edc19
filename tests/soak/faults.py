"""Break training runs at random moments, resume them, and compare them with an undisturbed run.

A run that reaches its end must have seen every image once in every epoch and must have the weights of the undisturbed
run, to the bit; then a new one begins.
"""

import importlib.util
import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from soak import runs
from soak.runs import Lane, Start, wait_until

from loaders.prep.convert import convert
from loaders.prep.encode import Settings
from loaders.prep.sources import open_source

_EARLY = 0.15  # share of the rounds that kill a run early, mostly before its first step
Fault = Callable[[Start, Lane, random.Random], None]


def kill(run: Start, lane: Lane, rng: random.Random) -> None:
    """Kill the process, which is the launcher where there are ranks."""
    runs.send(run.pid, signal.SIGKILL)
    run.expect({-signal.SIGKILL})


def kill_rank(run: Start, lane: Lane, rng: random.Random) -> None:
    """Kill one of two ranks; where ranks are started again, this run goes on by itself."""
    restarts = lane.torchrun or "max_restarts" in lane.flags
    for victim in runs.processes_of(run, lane, "rank")[rng.randrange(2) :][:1]:
        runs.send(victim, signal.SIGKILL)
    run.expect({0} if restarts else {137}, "" if restarts else "ended by SIGKILL")


def kill_worker(run: Start, lane: Lane, rng: random.Random) -> None:
    """Kill a data worker: the run says so and ends, unless the worker had just done its last work."""
    for victim in runs.processes_of(run, lane, "worker")[:1]:
        runs.send(victim, signal.SIGKILL)
    run.expect({2, 0}, "data worker was killed")


def ask_to_stop(run: Start, lane: Lane, rng: random.Random) -> None:
    """Send any signal, to the launcher or a rank."""
    number = rng.choice([signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
    runs.send(rng.choice([run.pid, *runs.processes_of(run, lane, "rank")]), number)
    run.expect({130 if number == signal.SIGINT else 75}, "--resume goes on from there")


def damage(run: Start, lane: Lane, rng: random.Random) -> None:
    """Kill, then cut the newest of several checkpoints short, or change a bit in its middle."""
    kill(run, lane, rng)
    for newest in sorted(lane.folder.glob("checkpoints/step_*.pt"))[1:][-1:]:
        data = bytearray(newest.read_bytes())
        if rng.random() < 0.5:
            del data[rng.randrange(len(data)) :]
        else:
            data[len(data) // 2] ^= 1 << rng.randrange(8)
        newest.write_bytes(data)


FAULTS: dict[str, tuple[int, list[Fault]]] = {  # by lane: its share of the rounds; faults in the order of their turns
    "torch": (13, [kill, ask_to_stop, damage, kill_worker, damage]),
    "dali": (12, [ask_to_stop, kill, damage]),
    "ffcv": (4, [damage, ask_to_stop, kill]),
    "2 ranks": (5, [kill_rank, ask_to_stop, kill]),
    "2 ranks with restarts": (2, [kill_rank, kill]),
    "torchrun": (1, [kill_rank, kill]),
}


def make_lanes(place: Path, wanted: Sequence[str]) -> list[Lane]:
    """Set up the ``wanted`` kinds of runs that are possible here."""
    images = runs.make_images(place / "images")
    data, plain = {"data": images, "val_data": images}, {"consistency": "none", "loader": "torch"}
    flags: dict[str, dict[str, Any]] = {
        "torch": data | {"loader": "torch"}, "dali": data | {"loader": "dali", "method": "simsiam"},
        "2 ranks": data | {"loader": "dali", "cpu_ranks": 2}, "torchrun": data | plain,
        "2 ranks with restarts": data | plain | {"cpu_ranks": 2, "max_restarts": 2},
    }  # fmt: skip
    if "ffcv" in wanted and importlib.util.find_spec("ffcv") is not None:
        stored = place / "images.beton"
        convert(open_source(images), stored, "beton", Settings(), workers=1)
        flags["ffcv"] = {"data": stored, "loader": "ffcv", "recipe": "released"}
    return [Lane(name, flags[name], place / name, torchrun=name == "torchrun") for name in wanted if name in flags]


class Rounds:
    """Rounds over some lanes. ``recovered``: seconds from starts to their first steps."""

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()
        self.recovered: list[float] = []
        self.compared = self.differing = 0

    def make(self, lanes: list[Lane], count: int, seed: int) -> "Rounds":
        """Make ``count`` rounds, and let unfinished runs come to their ends."""
        rng, turns = random.Random(seed), Counter[str]()
        last = {lane.name: runs.start(lane) for lane in lanes}
        try:
            for lane in lanes:
                last[lane.name].expect({0}, patience=runs.MORE_PATIENCE)
                lane.reference = runs.outcome(lane.folder)
                shutil.rmtree(lane.folder)
            order = [lane for lane in lanes for _ in range(FAULTS[lane.name][0])]
            rng.shuffle(order)
            for lane in [*(order[number % len(order)] for number in range(count)), *lanes]:
                faults = FAULTS[lane.name][1]
                fault = faults[turns[lane.name] % len(faults)] if turns.total() < count else None
                turns[lane.name] += 1
                if fault is None and not lane.folder.exists():
                    continue
                before = last[lane.name]  # whose processes must end by themselves
                wait_until(lambda run=before, it=lane: not runs.processes_of(run, it), "a process remains")
                last[lane.name] = runs.start(lane, "--resume")
                self._break(last[lane.name], lane, fault, rng)
        finally:  # leave nothing running
            for lane in lanes:
                runs.end(last[lane.name], lane)
        return self

    def _break(self, run: Start, lane: Lane, fault: Fault | None, rng: random.Random) -> None:
        """Break a run, or with no ``fault`` let it come to its end, and compare it if it is there."""
        if fault is not None:
            early = rng.random() < _EARLY
            if early:
                fault = kill
            else:
                wait_until(lambda: run.ended() or runs.seconds_to_step(lane.folder, run.began), f"no step: {lane.name}")
            time.sleep(rng.uniform(0, 1 if early else 1.5))
        if fault is None or run.ended():
            run.expect({0})
        else:
            fault(run, lane, rng)
            what = "survived" if run.code or fault is kill_rank else "had ended by itself"
            self.outcomes[f"{lane.name}: {fault.__name__}: {what}"] += 1
        self.recovered += runs.seconds_to_step(lane.folder, run.began)
        if run.code == 0:
            assert lane.reference is not None
            (seen, state), (expected, reference) = runs.outcome(lane.folder), lane.reference
            self.compared += 1
            self.differing += not runs.same(state, reference) or seen != expected
            shutil.rmtree(lane.folder)
