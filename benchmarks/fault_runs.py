"""Small training runs for :mod:`faults`: started again and again in one folder, watched from outside, compared.

A run trains a tiny network on a few images on the CPU. Its starts are forked from this process, which has imported
everything, because importing takes longer than a round; ranks are started by their launcher as always. What a run did
is read from its files: the ``samples`` lines of metrics.jsonl say what it saw, the last checkpoint what it learned.
"""

import json
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from cocor import checkpoint
from cocor.distributed import signals
from cocor.train import main

PATIENCE = 60.0  # seconds until a process counts as hanging
MORE_PATIENCE = 300.0  # for the first ones of all, which may have to compile
IMAGES, BATCH, EPOCHS = 64, 8, 4
STEPS = IMAGES // BATCH * EPOCHS
COMMON = {
    "backbone": "test_resnet",
    "image_size": 32,
    "batch_size": BATCH,
    "labelled_batch_size": 4,
    "queue_size": 24,
    "key_bn_splits": 2,
    "embedding_dim": 16,
    "projector_dim": 16,
    "predictor_dim": 8,
    "label_fraction": 0.25,
    "mmnn_wait_epochs": 0,
    "mmnn_warmup_epochs": 0,
    "epochs": EPOCHS,
    "knn_every": 2,
    "knn_k": 5,
    "gpus": 0,
    "workers": 1,
    "checkpoint_every_minutes": 0.3 / 60,
    "keep_checkpoints": 3,
    "log_samples": True,
}


@dataclass
class Lane:
    """A kind of run. ``reference`` is the :func:`outcome` of an undisturbed one. ``printed`` is the file for what it
    prints, by default beside ``folder``."""

    name: str
    flags: dict[str, Any]
    folder: Path
    torchrun: bool = False
    forked: bool = True  # not after this process has looked at a GPU
    reference: tuple[dict[int, list[int]], dict[str, Any]] | None = None
    printed: Path | None = None

    def command(self, *more: str) -> list[str]:
        values = COMMON | self.flags | {"output": self.folder}
        return [*(f"--{key.replace('_', '-')}={value}" for key, value in values.items()), *more]


@dataclass
class Start:
    """A started run; ``began`` in seconds of :func:`time.time`."""

    pid: int
    began: float
    output: Path  # what it prints
    code: int | None = None

    def ended(self) -> bool:
        """Whether it has ended; then ``code`` is its exit code, or minus the signal that ended it."""
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.code = os.waitstatus_to_exitcode(status)
        return self.code is not None

    def wait(self, patience: float = PATIENCE) -> int:
        wait_until(self.ended, lambda: f"process {self.pid} hangs: {self.text()[-2000:]}", patience)
        assert self.code is not None
        return self.code

    def text(self) -> str:
        """What it printed."""
        return self.output.read_text(errors="replace")


def start(lane: Lane, *more: str) -> Start:
    """Start ``lane`` in a session of its own, with the flags ``more``."""
    output = lane.printed or lane.folder.with_name(f"{lane.folder.name}.txt")
    output.parent.mkdir(parents=True, exist_ok=True)
    output.touch()
    sys.stdout.flush()
    began = time.time()
    pid = os.fork()
    if not pid:
        code = 1
        try:
            os.setsid()
            torch.set_num_threads(1)
            _handle_signals(signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            handle = os.open(output, os.O_WRONLY | os.O_TRUNC)
            os.dup2(handle, 1)
            os.dup2(handle, 2)
            if lane.torchrun:
                ranks = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "3", "-m", "cocor.train"]
                command = [sys.executable, "-m", "torch.distributed.run", *ranks, *lane.command(*more)]
                os.execv(sys.executable, command)
            if not lane.forked:
                os.execv(sys.executable, [sys.executable, "-m", "cocor.train", *lane.command(*more)])
            code = main(lane.command(*more))
        finally:
            os._exit(code)
    return Start(pid, began, output)


def stop_in_order() -> None:
    """Let any signal that asks this process to stop raise KeyboardInterrupt, the first time: runs in sessions of their
    own, temporary files and disks would outlive it."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        _handle_signals(signal.SIG_IGN)
        raise KeyboardInterrupt

    _handle_signals(interrupt)


def _handle_signals(handler: Callable[[int, FrameType | None], None] | signal.Handlers) -> None:
    for number in signals.SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, handler)


def make_images(folder: Path) -> None:
    """Smooth random pictures in four classes."""
    rng = np.random.default_rng(0)
    for number in range(IMAGES):
        small = Image.fromarray(rng.integers(0, 256, (6, 8, 3), np.uint8))
        place = folder / f"class{number % 4}"
        place.mkdir(parents=True, exist_ok=True)
        small.resize((64, 48), Image.Resampling.BICUBIC).save(place / f"{number}.jpg", quality=95)


class Broken(Exception):
    """Something did not go as it should; the message says what."""


def wait_until(condition: Callable[[], object], complaint: Callable[[], str], patience: float = PATIENCE) -> None:
    """Wait for ``condition``; Broken with the ``complaint`` when it takes too long."""
    end = time.monotonic() + patience
    while not condition():
        if time.monotonic() > end:
            raise Broken(complaint())
        time.sleep(0.01)


def records(folder: Path) -> list[dict[str, Any]]:
    """The whole lines of metrics.jsonl."""
    found = []
    try:
        for line in (folder / "metrics.jsonl").read_text().splitlines():
            found.append(json.loads(line))
    except (OSError, ValueError):
        pass
    return found


def first_step_after(folder: Path, moment: float) -> float | None:
    """When the first step after ``moment`` was finished, both in seconds of :func:`time.time`."""
    times = [line["time_s"] for line in records(folder) if line["kind"] == "samples" and line["time_s"] > moment]
    return min(times, default=None)


def checkpoints(folder: Path) -> list[Path]:
    """Oldest first."""
    return sorted(folder.glob("checkpoints/step_*.pt"))


def outcome(folder: Path) -> tuple[dict[int, list[int]], dict[str, Any]]:
    """What a finished run saw, by epoch, and the leaves of its final state, by path."""
    seen: dict[int, list[int]] = {}
    for line in records(folder):
        if line["kind"] == "samples":
            seen.setdefault(line["epoch"], []).extend(line["index"])
    state = checkpoint.load(folder / "checkpoints" / f"step_{STEPS:07d}.pt")
    return seen, dict(leaves(state["training"]))


def leaves(state: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(state, dict | list):
        for key, value in state.items() if isinstance(state, dict) else enumerate(state):
            yield from leaves(value, f"{place}/{key}")
    else:
        yield place, state


def differing(left: dict[str, Any], right: dict[str, Any]) -> int:
    """Leaves that are not equal to the bit."""

    def same(a: Any, b: Any) -> bool:
        return torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else type(a) is type(b) and a == b

    return sum(name not in left or name not in right or not same(left[name], right[name]) for name in {*left, *right})


def lost_and_repeated(seen: dict[int, list[int]]) -> tuple[int, int]:
    """How many samples epochs missed, and how many they saw more than once."""
    lost = repeated = 0
    for epoch in range(EPOCHS):
        counts = Counter(seen.get(epoch, []))
        lost += sum(counts[index] == 0 for index in range(IMAGES))
        repeated += sum(max(0, count - 1) for count in counts.values())
    return lost, repeated


@dataclass(frozen=True)
class Process:
    pid: int
    rank: bool  # started by a launcher, not forked
    worker: bool  # of a data loader


def processes_of(run: Start, lane: Lane) -> list[Process]:
    """Living processes of a start, itself included: its session, and what has the lane's folder in its command line."""
    needle, found = f"--output={lane.folder}\0".encode(), []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            state, parent, _, session = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
            command = (entry / "cmdline").read_bytes()
        except OSError:  # gone in the meantime
            continue
        named, child = needle in command, int(parent) == run.pid
        if state not in "ZX" and (named or int(session) == run.pid):
            worker = child and not named and b"resource_tracker" not in command
            found.append(Process(int(entry.name), child and named, worker))
    return sorted(found, key=lambda process: process.pid)


def send(pid: int, number: signal.Signals) -> None:
    """Send a signal to a process of a start, unless it has just ended by itself."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def end(run: Start, lane: Lane) -> None:
    """Kill whatever is left of a start."""
    for process in processes_of(run, lane):
        send(process.pid, signal.SIGKILL)
