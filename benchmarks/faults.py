"""Break training runs at random moments, resume them, and compare their outcome with that of an undisturbed run.

    python benchmarks/faults.py --rounds 100

A round starts or resumes a small training run on the CPU, waits a random time and does something to it: kills it, its
launcher, one of its ranks or data workers, asks it to stop, fills its disk, damages its newest checkpoint. The next
round must resume the same run with nothing but ``--resume``. A run that reaches its end must have seen every image once
in every epoch and must have the weights of the undisturbed run, to the bit; then a new one begins. Exits with 1 if a
sample was lost or repeated, a weight differs, or something hangs or fails in another way than it should, which also
ends the rounds of the kinds of runs that share its core.
"""

import importlib.util
import multiprocessing
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import fault_runs as runs
from cocor.cli import command
from common import describe_machine, machine_line
from fault_acts import FAULTS, Fault, expect, kill, kill_everything, kill_rank
from fault_runs import Broken, Lane, Start, wait_until
from loaders.arguments import Parser, not_negative, positive
from loaders.prep.convert import convert
from loaders.prep.encode import Settings
from loaders.prep.sources import open_source

_DISK = 32 * 2**20  # bytes of the small disk
_EARLY = 0.15  # share of the rounds that kill a run early, mostly before its first step
_JOBS = (("torch", "ffcv", "disk"), ("dali", "2 ranks", "2 ranks with restarts", "torchrun"))  # lanes on one core
_SHARES = {  # of the rounds
    "torch": 13,
    "ffcv": 4,
    "disk": 3,
    "dali": 12,
    "2 ranks": 5,
    "2 ranks with restarts": 2,
    "torchrun": 1,
}


@dataclass
class Account:
    """Results of the rounds. ``recovered``: seconds from a start to its first step."""

    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)
    recovered: list[float] = field(default_factory=list)
    compared: int = 0
    lost: int = 0
    repeated: int = 0
    differing: int = 0
    broken: str = ""

    def add(self, other: "Account") -> None:
        self.outcomes.update(other.outcomes)
        self.recovered += other.recovered
        self.compared += other.compared
        self.lost += other.lost
        self.repeated += other.repeated
        self.differing += other.differing
        self.broken += other.broken

    def report(self, seconds: float) -> bool:
        """Print all of it; whether nothing was lost, repeated, different or broken."""
        for (name, what), count in sorted(self.outcomes.items()):
            print(f"  {name:<40} {count:4d} {what}")
        survived = sum(count for (_, what), count in self.outcomes.items() if what == "survived")
        rounds, minutes = self.outcomes.total(), seconds / 60
        print(f"{rounds} rounds in {minutes:.1f} min, {survived} faults survived, {self.compared} whole runs compared")
        print(f"samples lost: {self.lost}, repeated: {self.repeated}; weights that differ: {self.differing}")
        mean, most = sum(self.recovered) / max(1, len(self.recovered)), max(self.recovered, default=0.0)
        print(f"seconds from a start to its first step: {mean:.1f} on average, {most:.1f} at most")
        print(self.broken, end="", file=sys.stderr)
        return not (self.lost or self.repeated or self.differing or self.broken)


class Rounds:
    """Rounds over some lanes, one at a time."""

    def __init__(self, seed: int) -> None:
        self.account = Account()
        self._rng = random.Random(seed)
        self._turns: Counter[str] = Counter()
        self._last: dict[str, Start] = {}

    def round(self, lane: Lane) -> None:
        """One start, one fault."""
        if lane.reference is None:
            self._find_reference(lane)
        fault = FAULTS[lane.name][self._turns[lane.name] % len(FAULTS[lane.name])]
        self._turns[lane.name] += 1
        run = self._start(lane)
        if self._rng.random() < _EARLY:
            time.sleep(self._rng.uniform(0, 1))
            fault = fault if fault is kill_everything else kill
        else:
            self._wait_for_step(run, lane)
            time.sleep(self._rng.uniform(0, 1.5))
        self._break(run, lane, fault)

    def finish(self, lane: Lane) -> None:
        """Let the lane's unfinished run, if any, come to its end."""
        if lane.folder.exists():
            run = self._start(lane)
            expect(run, {0})
            self._note(run, lane)

    def end(self, lanes: Sequence[Lane]) -> None:
        """Leave nothing running."""
        for lane in lanes:
            if lane.name in self._last:
                runs.end(self._last[lane.name], lane)

    def _find_reference(self, lane: Lane) -> None:
        run = self._last[lane.name] = runs.start(lane)
        if run.wait(runs.MORE_PATIENCE) != 0:
            raise Broken(f"the undisturbed run fails: {run.text()}")
        lane.reference = runs.outcome(lane.folder)
        shutil.rmtree(lane.folder)

    def _start(self, lane: Lane) -> Start:
        """Start or resume. Processes left by the start before must end by themselves."""
        last = self._last[lane.name]
        wait_until(lambda: not runs.processes_of(last, lane), lambda: "a process outlives the end of its run")
        self._last[lane.name] = runs.start(lane, "--resume")
        return self._last[lane.name]

    def _wait_for_step(self, run: Start, lane: Lane) -> None:
        def begun() -> bool:
            return run.ended() or runs.first_step_after(lane.folder, run.began) is not None

        wait_until(begun, lambda: f"no step is made: {run.text()}")

    def _break(self, run: Start, lane: Lane, fault: Fault) -> None:
        name = f"{lane.name}: {fault.__name__.replace('_', ' ')}"
        if run.ended():
            name = f"{lane.name}: nothing"
            expect(run, {0})
        else:
            try:
                fault(run, lane, self._rng)
            except Broken as error:
                raise Broken(f"{name}: {error}") from None
        what = "survived" if run.code or fault is kill_rank else "had ended by itself"
        self.account.outcomes[name, what] += 1
        print(f"{time.time() - run.began:6.1f} s  {name}: {what}", file=sys.stderr, flush=True)
        self._note(run, lane)

    def _note(self, run: Start, lane: Lane) -> None:
        """Record what a start did, and compare the run if it is at its end."""
        account, moment = self.account, runs.first_step_after(lane.folder, run.began)
        if moment is not None:
            account.recovered.append(moment - run.began)
        if run.code == 0:
            assert lane.reference is not None
            (seen, state), (expected, reference) = runs.outcome(lane.folder), lane.reference
            lost, repeated = runs.lost_and_repeated(seen)
            account.lost, account.repeated = account.lost + lost, account.repeated + repeated
            account.differing += runs.differing(state, reference) + (seen != expected)
            account.compared += 1
            shutil.rmtree(lane.folder)


def work(lanes: list[Lane], count: int, seed: int) -> Account:
    """``count`` rounds over ``lanes``."""
    rounds = Rounds(seed)
    order = [lane for lane in lanes for _ in range(_SHARES[lane.name])]
    random.Random(seed).shuffle(order)
    try:
        for number in range(count):
            rounds.round(order[number % len(order)])
        for lane in lanes:
            rounds.finish(lane)
    except Broken as error:
        rounds.account.broken = f"{error}\n"
    finally:
        rounds.end(lanes)
    return rounds.account


@contextmanager
def small_disk(folder: Path) -> Iterator[bool]:
    """Mount a small disk at ``folder``; whether that was possible (it needs root)."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={_DISK}", "tmpfs", str(folder)]
    mounted = shutil.which("mount") and not subprocess.run(command, capture_output=True, check=False).returncode
    try:
        yield bool(mounted)
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(folder)], check=True)


def make_lanes(place: Path, disk: Path | None, wanted: Sequence[str]) -> list[Lane]:
    """The ``wanted`` kinds of runs that are possible here, each in its own folder."""
    images = place / "images"
    runs.make_images(images)
    data = {"data": images, "val_data": images}
    plain = data | {"consistency": "none", "loader": "torch"}
    lanes = [
        Lane("torch", data | {"loader": "torch"}, place / "torch"),
        Lane("dali", data | {"loader": "dali", "method": "simsiam"}, place / "dali"),
        Lane("2 ranks", data | {"loader": "dali", "cpu_ranks": 2}, place / "ranks"),
        Lane("2 ranks with restarts", plain | {"cpu_ranks": 2, "max_restarts": 2}, place / "restarts"),
        Lane("torchrun", plain, place / "torchrun", torchrun=True),
    ]
    if "ffcv" in wanted and importlib.util.find_spec("ffcv") is not None:
        stored = place / "images.beton"
        convert(open_source(images), stored, "beton", Settings(), workers=1)
        lanes.append(Lane("ffcv", {"data": stored, "loader": "ffcv", "recipe": "released"}, place / "ffcv"))
    if disk is not None:
        flags = data | {"loader": "torch", "keep_checkpoints": 2}
        lanes.append(Lane("disk", flags, disk / "run", printed=place / "disk.txt"))
    return [lane for lane in lanes if lane.name in wanted]


def main() -> None:
    """Run the rounds."""
    parser = Parser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--rounds", type=positive, default=100)
    names = list(FAULTS)
    parser.add_argument("--lanes", nargs="+", choices=names, default=names, metavar="LANE", help=", ".join(names))
    parser.add_argument("--seed", type=not_negative, default=0)
    options = parser.parse_all()
    print(machine_line(describe_machine()), flush=True)
    runs.stop_in_order()  # the processes of the pool as well
    begin, total = time.monotonic(), Account()
    with ExitStack() as stack:
        folder = tempfile.TemporaryDirectory(prefix="cocor-faults-", ignore_cleanup_errors=True)
        place = Path(stack.enter_context(folder))
        disk = stack.enter_context(small_disk(place / "disk"))
        lanes = make_lanes(place, place / "disk" if disk else None, options.lanes)
        for name in sorted(set(options.lanes) - {lane.name for lane in lanes}):
            print(f"{name}: left out, this machine lacks what it takes")
        jobs = [[lane for lane in lanes if lane.name in names] for names in _JOBS]
        jobs = [job for job in jobs if job]
        counts = [len(range(number, options.rounds, len(jobs))) for number in range(len(jobs))]
        pool = stack.enter_context(ProcessPoolExecutor(len(jobs), multiprocessing.get_context("fork")))
        try:
            for account in pool.map(work, jobs, counts, range(options.seed, options.seed + len(jobs))):
                total.add(account)
        except KeyboardInterrupt:
            for process in multiprocessing.active_children():
                process.terminate()
            raise
    if not total.report(time.monotonic() - begin):
        raise SystemExit(1)


if __name__ == "__main__":
    sys.exit(command("faults.py", main))
