"""Profile the host's work for a batch of the DALI loader, by stage and thread.

    python benchmarks/host_profile.py --data imagenet/train
    python benchmarks/host_profile.py --data imagenet/train --gpus 1 --batch-size 256 --read-at-once 64

stage    wall and CPU milliseconds a batch, summed over the threads that are in it; wall beyond CPU is waiting, for the
         interpreter's lock, the disk or another thread. A stage may contain others: DALI's run has the hand-over in it.
threads  CPU milliseconds a batch, by the names that Python or DALI gives them.
Files come from the page cache, if there is room for them.
"""

import argparse
import os
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import closing
from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np
import torch

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])

from loaders.cpus import available_cores
from loaders.dali.decoder import DaliDecoder
from loaders.dali.inputs import Feed
from loaders.dali.loader import DaliLoader
from loaders.datasets.file_reader import FileReader, StoredReader, judge
from loaders.open import open_images
from loaders.pipeline.jobs import Jobs
from loaders.views.order import CyclicOrder
from loaders.views.plan import ViewPlan

STAGES: dict[str, list[tuple[type, str]]] = {
    "plan a batch": [(Jobs, "_job")],
    "begin a request": [(Feed, "begin")],
    "wait for its files": [(Feed, "finish")],
    "read and judge": [(FileReader, "read"), (StoredReader, "read")],
    "hand over to DALI": [(DaliDecoder, "_next_inputs")],
    "run DALI": [(DaliDecoder, "_run")],
}
_WARM_UP, _STEPS = 8, 1_000_000


class Stopwatch:
    """Wall and CPU seconds of functions, by stage."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}
        self._lock = threading.Lock()

    def watch(self, stage: str, owner: type, name: str) -> None:
        """Replace a method by one that is timed."""
        function: Callable[..., Any] = getattr(owner, name)
        found = self.seconds.setdefault(stage, [0.0, 0.0])

        @wraps(function)
        def timed(*arguments: Any, **options: Any) -> Any:
            wall, cpu = time.perf_counter(), time.thread_time()
            try:
                return function(*arguments, **options)
            finally:
                wall, cpu = time.perf_counter() - wall, time.thread_time() - cpu
                with self._lock:
                    found[0] += wall
                    found[1] += cpu

        setattr(owner, name, timed)

    def restart(self) -> None:
        """Forget what was timed."""
        for found in self.seconds.values():
            found[:] = [0.0, 0.0]


def main() -> None:
    options = arguments()
    images = open_images(options.data)
    device = torch.device("cuda", 0) if options.gpus else torch.device("cpu")
    watch = Stopwatch()
    for stage, methods in STAGES.items():
        for owner, name in methods:
            watch.watch(stage, owner, name)
    order = CyclicOrder(len(images), options.batch_size, steps=_STEPS, seed=1)
    loader = DaliLoader(
        images, ViewPlan(options.size), order=order, device=device, workers=options.workers,
        read_at_once=options.read_at_once,
    )  # fmt: skip
    with closing(loader):
        batches = loader.epoch(0)
        for _ in range(_WARM_UP):
            next(batches)
        watch.restart()
        before, start, count = thread_seconds(), time.perf_counter(), 0
        while time.perf_counter() - start < options.seconds:
            next(batches)
            count += 1
        if options.gpus:
            torch.cuda.synchronize()
        wall, after = time.perf_counter() - start, thread_seconds()
        print(f"{count} batches of {options.batch_size}: {count * options.batch_size / wall:,.0f} samples/s")
        print(f"{1000 * wall / count:.2f} ms a batch, {sum(after.values()) - sum(before.values()):.2f} s of CPU time\n")
        print(f"{'stage':24}{'wall ms':>10}{'CPU ms':>10}")
        for stage, (total, cpu) in watch.seconds.items():
            print(f"{stage:24}{1000 * total / count:10.2f}{1000 * cpu / count:10.2f}")
        print(f"{'of it to judge, at most':24}{judging_ms(loader, options.batch_size):10.2f}\n")
        print(f"{'threads':24}{'CPU ms':>20}")
        used = {name: seconds - before.get(name, 0.0) for name, seconds in after.items()}
        for name, seconds in sorted(used.items(), key=lambda item: -item[1]):
            if seconds > 0:
                print(f"{name:24}{1000 * seconds / count:20.2f}")


def thread_seconds() -> dict[str, float]:
    """CPU seconds of this process's threads, by name without numbers."""
    names = {thread.native_id: thread.name for thread in threading.enumerate()}
    tick, found = os.sysconf("SC_CLK_TCK"), defaultdict[str, float](float)
    for task in Path("/proc/self/task").iterdir():
        try:
            own, _, rest = (task / "stat").read_text().partition("(")[2].rpartition(")")
        except OSError:  # it has ended
            continue
        user, system = rest.split()[11:13]
        found[names.get(int(task.name), own).rstrip("0123456789_-")] += (int(user) + int(system)) / tick
    return found


def judging_ms(loader: DaliLoader, count: int) -> float:
    """Milliseconds to judge ``count`` images, called from Python one by one."""
    images, reader = loader.dataset, loader._feed._reader
    index = np.resize(np.arange(len(images)), count)
    lengths = reader.lengths[index]
    ends, verdicts = np.cumsum(lengths), np.empty(count, np.uint8)
    block = np.empty(int(ends[-1]), np.uint8)
    reader.read(index, ends - lengths, block, verdicts)
    parts, sizes = np.split(block, ends[:-1]), images.sizes[index].tolist()
    judge(parts[0], *sizes[0])
    start = time.perf_counter()
    for part, (height, width) in zip(parts, sizes, strict=True):
        judge(part, height, width)
    return 1000 * (time.perf_counter() - start)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of images, or .beton file")
    parser.add_argument("--gpus", type=int, choices=(0, 1), default=int(torch.cuda.is_available()))
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--size", type=int, default=224, help="side of the views in pixels")
    parser.add_argument("--workers", type=int, default=available_cores(), help="DALI's threads")
    parser.add_argument("--read-at-once", type=int, help="files read at once (default: the loader's)")
    parser.add_argument("--seconds", type=float, default=6.0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
