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
from contextlib import closing
from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np
import torch

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])

from benchmarks.common import script
from loaders.arguments import Parser, above_zero, positive
from loaders.cpus import available_cores
from loaders.dali.decoder import DaliDecoder
from loaders.dali.inputs import Feed
from loaders.dali.loader import DaliLoader
from loaders.datasets.file_reader import FileReader, StoredReader
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


def watch(owner: type, name: str, found: np.ndarray, lock: threading.Lock) -> None:
    """Replace a method by one that adds its wall and CPU seconds to ``found`` (2,)."""
    function = getattr(owner, name)

    @wraps(function)
    def timed(*arguments: Any, **options: Any) -> Any:
        before = np.array([time.perf_counter(), time.thread_time()])
        try:
            return function(*arguments, **options)
        finally:
            with lock:
                found[:] += np.array([time.perf_counter(), time.thread_time()]) - before

    setattr(owner, name, timed)


def main() -> None:
    options = arguments()
    images = open_images(options.data)
    seconds, lock = {stage: np.zeros(2) for stage in STAGES}, threading.Lock()
    for stage, methods in STAGES.items():
        for owner, name in methods:
            watch(owner, name, seconds[stage], lock)
    loader = DaliLoader(
        images, ViewPlan(options.size), order=CyclicOrder(len(images), options.batch_size, steps=_STEPS, seed=1),
        device="cuda" if options.gpus else "cpu", workers=options.workers, read_at_once=options.read_at_once,
    )  # fmt: skip
    with closing(loader):
        batches = loader.epoch(0)
        for _ in range(_WARM_UP):
            next(batches)
        for found in seconds.values():
            found[:] = 0.0
        before, start, count = thread_seconds(), time.perf_counter(), 0
        while time.perf_counter() - start < options.seconds:
            next(batches)
            count += 1
        if options.gpus:
            torch.cuda.synchronize()
        wall, after = time.perf_counter() - start, thread_seconds()
    used = {name: spent - before.get(name, 0.0) for name, spent in after.items()}
    print(f"{count} batches of {options.batch_size}: {count * options.batch_size / wall:,.0f} samples/s")
    print(f"{1000 * wall / count:.2f} ms a batch, {sum(used.values()):.2f} s of CPU time\n")
    print(f"{'stage':24}{'wall ms':>10}{'CPU ms':>10}")
    for stage, found in seconds.items():
        print(f"{stage:24}{1000 * found[0] / count:10.2f}{1000 * found[1] / count:10.2f}")
    print(f"\n{'threads':24}{'CPU ms':>20}")
    for name, spent in sorted(used.items(), key=lambda item: -item[1]):
        if spent > 0:
            print(f"{name:24}{1000 * spent / count:20.2f}")


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


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--data", type=Path, required=True, help="folder of images, or .beton file")
    add("--gpus", type=int, choices=(0, 1), default=int(torch.cuda.is_available()))
    add("--batch-size", type=positive, default=256)
    add("--size", type=positive, default=224, help="side of the views in pixels")
    add("--workers", type=positive, default=available_cores(), help="DALI's threads")
    add("--read-at-once", type=positive, help="files read at once (default: the loader's)")
    add("--seconds", type=above_zero, default=6.0)
    return parser.parse_all()


if __name__ == "__main__":
    script("host_profile.py", main)
