"""Kill conversions at random moments and look at what is left.

    python benchmarks/prep_faults.py --rounds 200

Every round starts ``cocor-prep convert`` on generated images, waits a random time, and sends SIGKILL to the parent, to
a worker, or to the whole process group, in turn. It then checks that all its processes end, that no output has appeared
unless the conversion had finished, that an unfinished file is refused, and, now and then, that the same call succeeds.
Exits with 1 at the first violation.
"""

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
from PIL import Image

from cocor.cli import command
from loaders.arguments import Parser, not_negative, positive
from loaders.datasets.beton import open_beton
from loaders.errors import UserError

_PATIENCE = 20.0  # seconds until a process counts as hanging
_COMPLETE_EVERY = 10  # rounds


def main() -> None:
    """Run the rounds."""
    parser = Parser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--rounds", type=positive, default=200)
    parser.add_argument("--images", type=positive, default=200)
    parser.add_argument("--seed", type=not_negative, default=0)
    options = parser.parse_all()
    rng = random.Random(options.seed)
    outcomes: Counter[str] = Counter()
    slowest = 0.0
    with tempfile.TemporaryDirectory() as place:
        source, shared_memory = Path(place, "source"), set(os.listdir("/dev/shm"))  # noqa: PTH208
        make_images(source, options.images)
        start = time.monotonic()
        complete(source, Path(place, "trial.beton"))
        duration = time.monotonic() - start
        for number in range(options.rounds):
            victim, suffix = ("parent", "worker", "group")[number % 3], (".beton", "")[number // 3 % 2]
            work = Path(place, f"round{number}")
            work.mkdir()
            code, seconds = kill_one(rng, source, work / f"out{suffix}", victim, rng.uniform(0.05, duration))
            check(work, code, victim)
            outcomes[f"{victim}: {'finished first' if code == 0 else 'killed'}"] += 1
            slowest = max(slowest, seconds)
            if number % _COMPLETE_EVERY == 0:
                complete(source, work / f"out{suffix}", "--force")
                if [path.name for path in work.iterdir()] != [f"out{suffix}"]:
                    raise SystemExit(f"round {number}: the next run left {os.listdir(work)}")  # noqa: PTH208
        left = len(set(os.listdir("/dev/shm")) - shared_memory)  # noqa: PTH208
    print(f"{options.rounds} rounds, a run takes {duration:.1f} s; last process gone after at most {slowest:.2f} s")
    print(f"{left} new names in /dev/shm, from anything on this machine")
    for outcome, count in sorted(outcomes.items()):
        print(f"  {count:4d} {outcome}")


def make_images(folder: Path, count: int) -> None:
    """Noise of 400 x 300 pixels in four classes."""
    noise = np.random.default_rng(0).integers(0, 256, (300, 400, 3), np.uint8)
    for number in range(count):
        place = folder / f"class{number % 4}"
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.roll(noise, number, 1)).save(place / f"{number}.jpg", quality=95)


def conversion(source: Path, output: Path, *more: str) -> list[str]:
    """The conversion under test: every image is decoded, resized and encoded by two workers."""
    options = ["--workers", "2", "--shorter-side", "280", *more]
    return [sys.executable, "-m", "loaders.prep.cli", "convert", str(source), str(output), *options]


def complete(source: Path, output: Path, *more: str) -> None:
    """A conversion that nobody disturbs."""
    subprocess.run(conversion(source, output, *more), check=True, stdout=subprocess.DEVNULL, timeout=60 + _PATIENCE)


def kill_one(rng: random.Random, source: Path, output: Path, victim: str, delay: float) -> tuple[int, float]:
    """Start a conversion and kill ``victim`` after ``delay`` seconds; exit code, and seconds until all had ended."""
    process = subprocess.Popen(
        conversion(source, output), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True
    )
    try:
        time.sleep(delay)
        start = _kill(rng, process, victim)
        _, error = process.communicate(timeout=_PATIENCE)  # until no process holds its stderr
        while any(group == process.pid for _, _, group, _ in processes()):
            if time.monotonic() - start > _PATIENCE:
                raise subprocess.TimeoutExpired(process.args, _PATIENCE)
            time.sleep(0.01)
        seconds = time.monotonic() - start
    except subprocess.TimeoutExpired:
        raise SystemExit(f"killed the {victim} after {delay:.2f} s: a process still runs") from None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    if victim == "worker" and process.returncode and (process.returncode != 2 or b"worker process died" not in error):
        raise SystemExit(f"killed a worker after {delay:.2f} s: exit code {process.returncode}, {error.decode()!r}")
    return process.returncode, seconds


def _kill(rng: random.Random, process: subprocess.Popen[bytes], victim: str) -> float:
    """Kill the parent, the whole group, or a worker, once there is one; the moment by :func:`time.monotonic`."""
    workers: list[int] = []
    while victim == "worker" and not workers and process.poll() is None:
        time.sleep(0.005)
        workers = workers_of(process.pid)
    moment = time.monotonic()
    if victim == "group":
        os.killpg(process.pid, signal.SIGKILL)
    elif victim == "parent":
        process.kill()
    elif workers:
        with suppress(ProcessLookupError):  # it has just ended by itself
            os.kill(rng.choice(workers), signal.SIGKILL)
    return moment


def check(work: Path, code: int, victim: str) -> None:
    """Nothing is visible unless it is whole, what else is left is no valid file, and a run that fails tidies up."""
    visible = [path for path in work.iterdir() if not path.name.startswith(".")]
    if code and visible:
        # Killed after the rename, which is the last thing that it does: then the output must be whole.
        for path in visible:
            if path.suffix == ".beton":
                open_beton(path)
            elif not (path / ".cocor-prep").is_file():
                raise SystemExit(f"{path} appeared though the conversion was killed")
    if code == 2 and victim == "worker" and list(work.iterdir()):
        raise SystemExit(f"{work}: left {os.listdir(work)} behind")  # noqa: PTH208
    for unfinished in work.glob(".*/content"):
        if unfinished.is_file():
            try:
                open_beton(unfinished)
            except UserError:
                continue
            raise SystemExit(f"{unfinished} would be accepted")


def processes() -> Iterator[tuple[int, int, int, bool]]:
    """(process, parent, group, whether multiprocessing has started it as a worker) of all living processes."""
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent, group = entry.read_text().rpartition(")")[2].split()[:3]
            worker = b"spawn_main" in (entry.parent / "cmdline").read_bytes()
        except OSError:  # gone in the meantime
            continue
        if state != "Z":
            yield int(entry.parent.name), int(parent), int(group), worker


def workers_of(parent: int) -> list[int]:
    """The worker processes of a conversion."""
    return [process for process, its_parent, _, worker in processes() if its_parent == parent and worker]


if __name__ == "__main__":
    sys.exit(command("prep_faults.py", main))
