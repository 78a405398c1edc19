"""Stop a run in mid-epoch, resume it, and compare its weights with an unbroken run's, and with the noise between two.

    python benchmarks/resume_noise.py                      # on a GPU if there is one; --device cpu

A tiny network is trained three times by each loader, side by side: twice unbroken, and once with a signal in the second
epoch and a resume. On the CPU all three are equal to the bit. On a GPU two unbroken runs differ, because sums are made
in another order each time; the resumed one must differ by no more than that. Printed is the distance of all weights,
moments and queues from the first run's, relative to their norm. Exits with 1 if a sample is lost or repeated, or if the
resumed run is further away than three times the noise.
"""

import argparse
import importlib.util
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor

import fault_runs as runs
from cocor.cli import command
from cocor.config.options import Execution
from common import describe_machine, machine_line
from fault_runs import Broken, Lane, Start, wait_until
from loaders.arguments import Parser
from loaders.prep.convert import convert
from loaders.prep.encode import Settings
from loaders.prep.sources import open_source

_FACTOR = 3.0  # of the noise between two runs, which is itself drawn at random
_SIGNAL_AFTER = runs.IMAGES // runs.BATCH + 2  # steps
_LOADERS = ("dali", "ffcv", "torch", "synthetic")


def main() -> None:
    """Make the runs."""
    parser = Parser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--loaders", nargs="+", choices=_LOADERS, default=["dali", "ffcv"])
    parser.add_argument(
        "--execution",
        choices=get_args(Execution),
        default="eager",
        help="as of cocor-train; compiling takes longer than the runs",
    )
    options = parser.parse_all()
    print(machine_line(describe_machine()), flush=True)
    runs.stop_in_order()
    fine = True
    with tempfile.TemporaryDirectory(prefix="cocor-noise-", ignore_cleanup_errors=True) as folder:
        for lane in _lanes(Path(folder), options):
            begin = time.monotonic()
            try:
                good, line = _compare(lane)
            except Broken as error:
                good, line = False, str(error)
            fine &= good
            print(f"{lane.name:<10} {line}  ({time.monotonic() - begin:.0f} s)", flush=True)
    if not fine:
        raise SystemExit(1)


def _lanes(place: Path, options: argparse.Namespace) -> list[Lane]:
    images, stored = place / "images", place / "images.beton"
    runs.make_images(images)
    flags = {
        "gpus": int(options.device == "cuda"),
        "execution": options.execution,
        "workers": 2,
        "checkpoint_every_minutes": 0,
    }
    lanes = []
    for loader in options.loaders:
        if loader == "ffcv" and importlib.util.find_spec("ffcv") is None:
            print("ffcv       left out: not installed here")
            continue
        if loader == "ffcv":
            convert(open_source(images), stored, "beton", Settings(), workers=1)
        source = stored if loader == "ffcv" else images
        data: dict[str, Any] = {"data": source, "val_data": source, "loader": loader, "synthetic_images": runs.IMAGES}
        lanes.append(Lane(loader, flags | data, place / loader, forked=options.device == "cpu"))
    return lanes


def _compare(lane: Lane) -> tuple[bool, str]:
    """Whether a resumed run is what an unbroken one is, and what to print about it."""
    one, two, broken = (
        replace(lane, name=f"{lane.name}-{name}", folder=lane.folder / name) for name in ("one", "two", "resumed")
    )
    with ExitStack() as stack:

        def start(run: Lane, *more: str) -> Start:
            process = runs.start(run, *more)
            stack.callback(runs.end, process, run)
            return process

        processes = [start(run) for run in (one, two)]
        stopped = _stop_and_resume(broken, start)
        for process in processes:
            _expect(process, 0)
    first, second, third = (runs.outcome(run.folder) for run in (one, two, broken))
    lost, repeated = runs.lost_and_repeated(third[0])
    noise, distance = _distance(first[1], second[1]), _distance(first[1], third[1])
    samples = "same samples" if third[0] == first[0] else "OTHER SAMPLES"
    line = (
        f"stopped after step {stopped} of {runs.STEPS}; {samples}, {lost} lost, {repeated} repeated; "
        f"two runs {noise:.1e} apart, the resumed one {distance:.1e}"
    )
    return third[0] == first[0] and not lost and not repeated and distance <= _FACTOR * noise, line


def _stop_and_resume(run: Lane, start: Callable[..., Start]) -> int:
    """Let ``run`` be stopped by a signal and resumed to its end; the step after which it was stopped."""
    process = start(run)

    def late() -> bool:
        return process.ended() or len([r for r in runs.records(run.folder) if r["kind"] == "samples"]) >= _SIGNAL_AFTER

    wait_until(late, lambda: f"no step is made: {process.text()}", runs.MORE_PATIENCE)
    if not process.ended():
        runs.send(process.pid, signal.SIGTERM)
    _expect(process, 75)
    stopped = int(runs.checkpoints(run.folder)[-1].stem.removeprefix("step_"))
    _expect(start(run, "--resume"), 0)
    return stopped


def _expect(process: Start, code: int) -> None:
    if process.wait(runs.MORE_PATIENCE) != code:
        raise Broken(f"exit code {process.code} instead of {code}: {process.text()}")


def _distance(left: dict[str, Any], right: dict[str, Any]) -> float:
    """Norm of the difference of all floating-point tensors, relative to that of ``left``; infinite if the states do not
    hold the same things."""
    if left.keys() != right.keys():
        return float("inf")
    apart = whole = 0.0
    for name, value in left.items():
        if isinstance(value, Tensor) and value.is_floating_point():
            apart += float((right[name].double() - value.double()).square().sum())
            whole += float(value.double().square().sum())
        elif runs.differing({name: value}, {name: right[name]}):
            return float("inf")
    return float((apart / whole) ** 0.5)


if __name__ == "__main__":
    sys.exit(command("resume_noise.py", main))
