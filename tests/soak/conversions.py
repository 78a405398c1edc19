"""Conversions that are killed at random moments: all processes end, and no output appears that is not whole."""

import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
from PIL import Image
from soak.runs import living

from loaders.datasets.beton import open_beton
from loaders.errors import UserError

_PATIENCE = 20.0  # seconds until a process counts as hanging


def rounds(source: Path, place: Path, count: int, seed: int = 0) -> None:
    """Start ``count`` conversions of ``source`` and kill parent, worker or process group of each, in turn."""
    rng, start = random.Random(seed), time.monotonic()
    complete(source, place / "trial.beton")
    duration = time.monotonic() - start
    for number in range(count):
        victim, suffix = ("parent", "worker", "group")[number % 3], (".beton", "")[number // 3 % 2]
        work = place / f"round{number}"
        work.mkdir()
        code = kill_one(rng, source, work / f"out{suffix}", victim, rng.uniform(0.05, duration))
        check(work, code, victim)
        if number % 10 == 0:
            complete(source, work / f"out{suffix}", "--force")
            assert [path.name for path in work.iterdir()] == [f"out{suffix}"]


def make_images(root: Path, count: int = 200) -> Path:
    """Draw images of 300 pixels: enough for a conversion to be in full swing for a while."""
    noise = np.random.default_rng(0).integers(0, 256, (300, 400, 3), np.uint8)
    for number in range(count):
        (root / f"class{number % 4}").mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.roll(noise, number, 1)).save(root / f"class{number % 4}" / f"{number}.jpg", quality=95)
    return root


def conversion(source: Path, output: Path, *more: str) -> list[str]:
    """Command under test: every image is decoded, resized and encoded by two workers."""
    options = ["--workers", "2", "--shorter-side", "280", *more]
    return [sys.executable, "-m", "loaders.prep.cli", "convert", str(source), str(output), *options]


def complete(source: Path, output: Path, *more: str) -> None:
    """Convert undisturbed."""
    subprocess.run(conversion(source, output, *more), check=True, stdout=subprocess.DEVNULL, timeout=60 + _PATIENCE)


def kill_one(rng: random.Random, source: Path, output: Path, victim: str, delay: float) -> int:
    """Start a conversion and kill ``victim`` after ``delay`` seconds; the exit code once all processes have ended."""
    command = conversion(source, output)
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True)
    try:
        time.sleep(delay)
        workers: list[int] = []
        while victim == "worker" and not workers and process.poll() is None:
            time.sleep(0.005)
            workers = [one for one, parent, *_, line in living() if parent == process.pid and b"spawn_main" in line]
        with suppress(ProcessLookupError, IndexError):  # it has just ended by itself
            os.kill({"parent": process.pid, "group": -process.pid}.get(victim) or rng.choice(workers), signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            _, error = process.communicate(timeout=_PATIENCE)  # until no process holds its stderr
        end = time.monotonic() + _PATIENCE
        while any(group == process.pid for _, _, group, *_ in living()):
            assert time.monotonic() < end, f"killed the {victim} after {delay:.2f} s: a process still runs"
            time.sleep(0.01)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    if victim == "worker" and process.returncode:
        assert process.returncode == 2 and b"worker process died" in error, (delay, process.returncode, error)
    return process.returncode


def check(work: Path, code: int, victim: str) -> None:
    """Nothing is visible unless it is whole, what else is left is no valid file, and a run that fails tidies up."""
    for path in work.glob("out*") if code else ():
        # Killed after the rename, which is the last thing that it does: then the output must be whole.
        assert open_beton(path) if path.suffix else (path / ".cocor-prep").is_file(), path
    assert not (code == 2 and victim == "worker" and list(work.iterdir()))
    for unfinished in work.glob(".*/content"):
        if unfinished.is_file():
            with suppress(UserError):
                open_beton(unfinished)
                raise AssertionError(f"{unfinished} would be accepted")
