"""What :mod:`faults` does to a run. Each fault waits for the run's end, and raises Broken if that is a wrong one."""

import os
import random
import signal
import time
from collections.abc import Callable

import fault_runs as runs
from fault_runs import Broken, Lane, Start

_STOPPED, _INTERRUPTED, _KILLED = 75, 130, -signal.SIGKILL


def kill(run: Start, lane: Lane, rng: random.Random) -> None:
    """The process, which is the launcher where there are ranks."""
    runs.send(run.pid, signal.SIGKILL)
    expect(run, {_KILLED})


def kill_everything(run: Start, lane: Lane, rng: random.Random) -> None:
    runs.end(run, lane)
    expect(run, {_KILLED})


def kill_rank(run: Start, lane: Lane, rng: random.Random) -> None:
    """One of two; where ranks are started again, this run goes on by itself."""
    restarts = lane.torchrun or "max_restarts" in lane.flags
    victims = [process.pid for process in runs.processes_of(run, lane) if process.rank]
    if victims:
        runs.send(rng.choice(victims), signal.SIGKILL)
    expect(run, {0} if restarts else {137}, "" if restarts else "ended by SIGKILL")


def kill_worker(run: Start, lane: Lane, rng: random.Random) -> None:
    """A data worker of the DataLoader: the run says so and ends."""
    workers = [process.pid for process in runs.processes_of(run, lane) if process.worker]
    if workers:
        runs.send(rng.choice(workers), signal.SIGKILL)
    # A worker that has just done its last work is not missed.
    expect(run, {2, 0}, "data worker was killed")


def ask_to_stop(run: Start, lane: Lane, rng: random.Random) -> None:
    """By any signal, to the launcher or a rank."""
    number = rng.choice([signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
    trainers = [process.pid for process in runs.processes_of(run, lane) if process.rank or process.pid == run.pid]
    runs.send(rng.choice(trainers or [run.pid]), number)
    expect(run, {_INTERRUPTED if number == signal.SIGINT else _STOPPED}, "--resume goes on from there")


def ask_twice(run: Start, lane: Lane, rng: random.Random) -> None:
    """The second request is obeyed at once, if the first was not yet."""
    runs.send(run.pid, signal.SIGTERM)
    time.sleep(0.6)
    if not run.ended():
        runs.send(run.pid, signal.SIGTERM)
    expect(run, {_STOPPED, 128 + signal.SIGTERM})


def truncate(run: Start, lane: Lane, rng: random.Random) -> None:
    """Kill, then cut the newest checkpoint short."""
    kill(run, lane, rng)
    *older, newest = [None, *runs.checkpoints(lane.folder)]
    if newest is not None and older[1:]:
        os.truncate(newest, rng.randrange(newest.stat().st_size))


def flip(run: Start, lane: Lane, rng: random.Random) -> None:
    """Kill, then change a byte in the middle of the newest checkpoint."""
    kill(run, lane, rng)
    *older, newest = [None, *runs.checkpoints(lane.folder)]
    if newest is not None and older[1:]:
        with newest.open("r+b") as file:
            file.seek(newest.stat().st_size // 2)
            byte = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte[0] ^ 1 << rng.randrange(8)]))


def fill_disk(run: Start, lane: Lane, rng: random.Random) -> None:
    """The run goes on, and says so; it must not pretend to be done. Then there is room again."""
    filler = lane.folder.parent / "filler"
    with filler.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(2**16))
        except OSError:
            pass
    try:
        expect(run, {2}, "No space left on device")
    finally:
        filler.unlink()


Fault = Callable[[Start, Lane, random.Random], None]
FAULTS: dict[str, list[Fault]] = {
    "torch": [kill, ask_to_stop, truncate, kill_worker, ask_twice, flip],
    "dali": [ask_to_stop, kill, flip, ask_twice, truncate],
    "ffcv": [truncate, ask_to_stop, kill],
    "disk": [fill_disk, kill, fill_disk, ask_to_stop],
    "2 ranks": [kill_rank, ask_to_stop, kill, kill_everything, ask_twice],
    "2 ranks with restarts": [kill_rank, kill],
    "torchrun": [kill_rank, kill],
}
"""By kind of run, in the order of their turns."""


def expect(run: Start, codes: set[int], words: str = "") -> None:
    """Wait for the run's end: its regular one, or one of the exit ``codes`` after it has printed ``words``."""
    code = run.wait()
    if code not in codes | {0} or (code and words not in run.text()):
        raise Broken(f"exit code {code} instead of {sorted(codes)}, {words!r}: {run.text()[-3000:]}")
