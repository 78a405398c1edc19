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
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils._pytree import tree_leaves

from cocor import checkpoint
from cocor.distributed import signals
from cocor.train import main
from loaders.prep.convert import convert
from loaders.prep.encode import Settings
from loaders.prep.sources import open_source

PATIENCE, MORE_PATIENCE = 60.0, 300.0  # seconds until a process counts as hanging; of the first, which may compile
IMAGES, BATCH, EPOCHS = 64, 8, 4
STEPS, STEPS_TO_STOP = IMAGES // BATCH * EPOCHS, IMAGES // BATCH + 2
COMMON = {
    "backbone": "test_resnet", "image_size": 32, "batch_size": BATCH, "labelled_batch_size": 4, "queue_size": 24,
    "key_bn_splits": 2, "embedding_dim": 16, "projector_dim": 16, "predictor_dim": 8, "label_fraction": 0.25,
    "mmnn_wait_epochs": 0, "mmnn_warmup_epochs": 0, "epochs": EPOCHS, "knn_every": 2, "knn_k": 5, "gpus": 0,
    "workers": 1, "checkpoint_every_minutes": 0.3 / 60, "keep_checkpoints": 3, "log_samples": True,
}  # fmt: skip
Outcome = tuple[dict[int, list[int]], list[Any]]


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
    values = COMMON | lane.flags | {"output": lane.folder}
    flags = [*(f"--{key.replace('_', '-')}={value}" for key, value in values.items()), *more]
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
                os.execv(sys.executable, [sys.executable, *launcher.split(), *flags])
            code = main(flags)
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


def stored(images: Path) -> Path:
    """Convert the pictures to a file for FFCV."""
    path = images.with_suffix(".beton")
    convert(open_source(images), path, "beton", Settings(), workers=1)
    return path


def wait_until(condition: Callable[[], object], complaint: str, patience: float = PATIENCE) -> None:
    end = time.monotonic() + patience
    while not condition():
        assert time.monotonic() < end, complaint
        time.sleep(0.01)


def samples(folder: Path) -> list[dict[str, Any]]:
    """Read the ``samples`` lines of metrics.jsonl that are whole."""
    file = folder / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return [json.loads(line) for line in lines if '"samples"' in line and line.endswith("}")]


def seconds_to_step(folder: Path, began: float) -> list[float]:
    """Seconds from a start to its first step, if it has made one."""
    return sorted(line["time_s"] - began for line in samples(folder) if line["time_s"] > began)[:1]


def outcome(folder: Path) -> Outcome:
    """What a finished run saw, by epoch, which must be every image once, and the leaves of its final state."""
    seen: dict[int, list[int]] = {}
    for line in samples(folder):
        seen.setdefault(line["epoch"], []).extend(line["index"])
    assert [sorted(seen[epoch]) for epoch in range(EPOCHS)] == [list(range(IMAGES))] * EPOCHS, (
        "lost or repeated samples"
    )
    state = checkpoint.load(folder / "checkpoints" / f"step_{STEPS:07d}.pt")
    return seen, tree_leaves(state["training"])


def same(a: Any, b: Any) -> bool:
    return torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else type(a) is type(b) and a == b


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


def compare(lane: Lane) -> tuple[float, float]:
    """Train ``lane`` twice unbroken and once resumed: distance of the two, and of the resumed one from the first. On a
    GPU neither is 0, as sums are made in another order each time."""
    lane.folder.mkdir()
    one, two, broken = (replace(lane, folder=lane.folder / name) for name in ("one", "two", "resumed"))
    with ExitStack() as stack:

        def tracked(run: Lane, *more: str) -> Start:
            process = start(run, *more)
            stack.callback(end, process, run)
            return process

        *unbroken, process = [tracked(run) for run in (one, two, broken)]
        wait_until(lambda: len(samples(broken.folder)) >= STEPS_TO_STOP, "no step is made", MORE_PATIENCE)
        send(process.pid, signal.SIGTERM)
        process.expect({75}, patience=MORE_PATIENCE)
        assert process.code == 75
        for process in (tracked(broken, "--resume"), *unbroken):
            process.expect({0}, patience=MORE_PATIENCE)
    first, second, third = (outcome(run.folder) for run in (one, two, broken))
    assert third[0] == first[0]  # the same samples
    return distance(first[1], second[1]), distance(first[1], third[1])


def distance(left: list[Any], right: list[Any]) -> float:
    """Norm of the difference of all floating-point tensors, relative to that of ``left``. The rest must be equal."""
    pairs = list(zip(left, right, strict=True))
    floats = [pair for pair in pairs if isinstance(pair[0], Tensor) and pair[0].is_floating_point()]
    assert all(same(*pair) for pair in pairs if not any(pair[0] is one for one, _ in floats))
    one, other = (torch.cat([pair[side].flatten().double() for pair in floats]) for side in (0, 1))
    return float((one - other).norm() / one.norm())
