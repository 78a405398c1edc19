"""Small training runs, started again and again in one folder, watched from outside, compared by their files.

Starts are forked from a process that has imported everything, because importing takes longer than a round.
"""

import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from helpers.runs import flags, flat
from PIL import Image
from torch import Tensor

from cocor import checkpoint
from cocor.distributed import signals
from cocor.train import main

PATIENCE, MORE_PATIENCE = 60.0, 300.0  # seconds until a process counts as hanging; of the first, which may compile
IMAGES, BATCH, EPOCHS = 64, 8, 4
STEPS = IMAGES // BATCH * EPOCHS
COMMON = {"embedding_dim": 16, "epochs": EPOCHS, "knn_every": 2, "checkpoint_every_minutes": 0.3 / 60,
          "keep_checkpoints": 3, "log_samples": True}  # fmt: skip
Outcome = tuple[dict[int, list[int]], dict[str, Any]]


@dataclass
class Lane:
    """A kind of run. ``reference``: outcome of an undisturbed one."""

    name: str
    flags: dict[str, Any]
    folder: Path
    torchrun: bool = False
    reference: Outcome | None = None


@dataclass
class Start:
    """A started run; ``began`` in seconds of :func:`time.time`, ``output`` holds what it prints."""

    pid: int
    began: float
    output: Path
    code: int | None = None

    def ended(self) -> bool:
        """Whether it has ended; then ``code`` is its exit code, or minus the signal that ended it."""
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.code = os.waitstatus_to_exitcode(status) if pid else None
        return self.code is not None

    def expect(self, codes: set[int], words: str = "", patience: float = PATIENCE) -> None:
        """Wait for its end: the regular one, or one of the exit ``codes`` after it has printed ``words``."""
        wait_until(self.ended, f"process {self.pid} hangs", patience)
        text = self.output.read_text(errors="replace")
        assert self.code in codes | {0} and (not self.code or words in text), (self.code, codes, words, text[-3000:])


def apart(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call ``function`` in a new process, from which runs may be forked: it has no threads."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def start(lane: Lane, *more: str) -> Start:
    """Start ``lane`` in a session of its own, with the flags ``more``."""
    output = lane.folder.with_name(f"{lane.folder.name}.txt")
    output.touch()
    arguments = [*flags(**COMMON | lane.flags, output=lane.folder), *more]
    sys.stdout.flush()
    began = time.time()
    pid = os.fork()
    if not pid:
        code = 1
        try:
            os.setsid()
            torch.set_num_threads(1)
            for number in signals.SIGNALS:
                signal.signal(number, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            handle = os.open(output, os.O_WRONLY | os.O_TRUNC)
            os.dup2(handle, 1)
            os.dup2(handle, 2)
            if lane.torchrun:
                launcher = "-m torch.distributed.run --standalone --nproc-per-node 2 --max-restarts 3 -m cocor.train"
                os.execv(sys.executable, [sys.executable, *launcher.split(), *arguments])
            code = main(arguments)
        finally:
            os._exit(code)
    return Start(pid, began, output)


def make_images(folder: Path) -> Path:
    """Draw smooth random pictures in four classes."""
    for number in range(IMAGES):
        small = Image.fromarray(np.random.default_rng(number).integers(0, 256, (6, 8, 3), np.uint8))
        (folder / f"class{number % 4}").mkdir(parents=True, exist_ok=True)
        small.resize((64, 48), Image.Resampling.BICUBIC).save(folder / f"class{number % 4}" / f"{number}.jpg")
    return folder


def samples(folder: Path) -> list[dict[str, Any]]:
    """Read the ``samples`` lines of metrics.jsonl that are whole."""
    file = folder / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return [json.loads(line) for line in lines if '"samples"' in line and line.endswith("}")]


def wait_until(condition: Callable[[], object], complaint: str, patience: float = PATIENCE) -> None:
    end = time.monotonic() + patience
    while not condition():
        assert time.monotonic() < end, complaint
        time.sleep(0.01)


def seconds_to_step(folder: Path, began: float) -> list[float]:
    """Seconds from a start to its first step, if it has made one."""
    return sorted(line["time_s"] - began for line in samples(folder) if line["time_s"] > began)[:1]


def outcome(folder: Path) -> Outcome:
    """Return what a finished run saw, by epoch, which must be every image once, and its final state."""
    seen: dict[int, list[int]] = {}
    for line in samples(folder):
        seen.setdefault(line["epoch"], []).extend(line["index"])
    assert [sorted(seen[epoch]) for epoch in range(EPOCHS)] == [list(range(IMAGES))] * EPOCHS, "lost or repeated"
    return seen, flat(checkpoint.load(folder / "checkpoints" / f"step_{STEPS:07d}.pt")["training"])


def same(left: dict[str, Any], right: dict[str, Any]) -> bool:
    def equal(a: Any, b: Any) -> bool:
        return torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else type(a) is type(b) and a == b

    return left.keys() == right.keys() and all(equal(value, right[name]) for name, value in left.items())


def living() -> Iterator[tuple[int, int, int, int, bytes]]:
    """List (process, parent, group, session, command line) of all living processes."""
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # gone in the meantime
            state, *numbers = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
            if state not in "ZX":
                parent, group, session = map(int, numbers)
                yield int(entry.name), parent, group, session, (entry / "cmdline").read_bytes()


def processes_of(run: Start, lane: Lane, kind: str = "") -> list[int]:
    """List living processes of a start, all or those of a ``kind``: "rank" of a launcher, "worker" of a data loader."""
    found = []
    for process, parent, _, session, command in living():
        named = f"--output={lane.folder}\0".encode() in command
        its_kind = "rank" if named else "other" if b"resource_tracker" in command else "worker"
        if (named or session == run.pid) and kind in ("", its_kind if parent == run.pid else "other"):
            found.append(process)
    return found


def send(pid: int, number: int) -> None:
    """Send a signal to a process, unless it has just ended by itself."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def end(run: Start, lane: Lane) -> None:
    """Kill whatever is left of a start."""
    for process in processes_of(run, lane):
        send(process, signal.SIGKILL)
