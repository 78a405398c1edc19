"""Run ``--profile``: show where a step's time goes, as a table and a trace.

Parts are timed by events on the device's stream wherever the work changes, so that they add up to the whole. They run
one after another: compiled if the run would be, but not as a CUDA graph, so launch overhead shows. In the cost model F
is one forward pass of the encoder over the batch, a backward pass costs 2 F. If steps differ
(``cocor.step.subsample``), times and costs are means over a cycle. On a CPU no part gets a thread of its own.
"""

import os
import sys
import time
from collections import defaultdict
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch.profiler import ProfilerActivity, profile

from cocor import run_dir
from cocor.auxiliary import AUXILIARIES
from cocor.auxiliary.base import composite_passes
from cocor.config.options import Config, labelled_batch_size
from cocor.distributed.collectives import barrier
from cocor.methods import method_class
from cocor.step.compile import compile_backbones
from cocor.step.cores import use_cores
from loaders.batch import Batch

if TYPE_CHECKING:  # run.py imports this folder
    from cocor.run import Run

WARM_UP, STEPS, TRACED = 5, 20, 3  # steps; STEPS at least, rounded up to whole turns
_MOST_STEPS = 240  # of a longer cycle; parts that are in few of its steps weigh little in their mean
_VIEWS_KERNEL = "make_views"
_Pair = tuple[Batch, Batch | None]


class Parts:
    """Timer of named parts on ``device``; time counts in the innermost one only."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._open = ["other"]
        self._marks: list[tuple[Any, str]] = []  # seconds, or events on a GPU

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        self._open.append(name)
        self._mark()
        try:
            yield
        finally:
            self._open.pop()
            self._mark()

    def start(self) -> None:
        """Begin anew: forget all earlier marks."""
        self._marks = []
        self._mark()

    def read(self) -> dict[str, float]:
        """Sum each part's seconds since the start; ``other`` is outside all. Waits."""
        self._mark()
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        seconds: dict[str, float] = defaultdict(float)
        for (begin, name), (end, _) in pairwise(self._marks):
            seconds[name] += end - begin if isinstance(begin, float) else begin.elapsed_time(end) / 1000
        return dict(seconds)

    def _mark(self) -> None:
        mark: Any = time.perf_counter()
        if self._device.type == "cuda":
            mark = torch.cuda.Event(enable_timing=True)
            mark.record()
        self._marks.append((mark, self._open[-1]))


def report(run: "Run") -> None:
    """Train for a few steps, print the table, leave a trace beside the run's folder."""
    parts = Parts(run.world.device)
    run.step.timer = parts
    if run.execution in ("compiled", "fused"):
        compile_backbones(run.step)
    if run.world.device.type == "cpu":
        use_cores(run.step, in_threads=False)
    with closing(_endless(run)) as batches:
        _steps(run, batches, parts, WARM_UP)
        parts.start()
        steps = min(-(-STEPS // run.step.subsample.cycle) * run.step.subsample.cycle, _MOST_STEPS)
        _steps(run, batches, parts, steps)
        seconds = parts.read()
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it calls having no GPU an error
        on_gpu = run.world.device.type == "cuda"
        with profile(activities=[ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * on_gpu]) as trace:
            _steps(run, batches, parts, TRACED)
            if on_gpu:
                torch.cuda.synchronize()
    barrier()
    if not run.world.main:
        return
    events = trace.key_averages() if on_gpu else ()
    views = sum(event.device_time_total for event in events if _VIEWS_KERNEL in event.key) / 1e6
    if views:
        seconds["views"] = views / TRACED * steps
    print("\n".join(table(run.config, seconds, steps, run.world.size)))
    path = run_dir.trace(run.config)
    path.parent.mkdir(parents=True, exist_ok=True)
    trace.export_chrome_trace(str(path))
    print(f"\ntrace of {TRACED} steps, for chrome://tracing or ui.perfetto.dev: {path}")
    sys.stdout.flush()


def table(config: Config, seconds: dict[str, float], steps: int, ranks: int) -> list[str]:
    """Format each part's milliseconds a step, its share, and its cost in F if any.

    ``seconds`` are those of ``steps`` steps. "views" is no part of the step: they are made on a stream of their own.
    """
    model = costs(config, ranks)
    # Passes that only the paper's approximation and the abs loss need are no part of the model.
    names = ["data wait", *model, "hypergradient", "optimiser", "communication", "logging", "other"]
    whole = sum(value for name, value in seconds.items() if name != "views")
    lines = [f"{'part':<16}{'ms a step':>10}{'share':>8}{'F':>7}{'ms per F':>10}"]
    for name in [name for name in names if name in seconds]:
        milliseconds, cost = 1000 * seconds[name] / steps, model.get(name)
        of_model = f"{cost:>7.2f}{milliseconds / cost:>10.2f}" if cost else ""
        lines.append(f"{name:<16}{milliseconds:>10.2f}{seconds[name] / whole:>8.1%}{of_model}")
    per_rank, total = config.batch_size // ranks, sum(model.values())
    milliseconds = 1000 * whole / steps
    lines.append(f"{'step':<16}{milliseconds:>10.2f}{1:>8.0%}{total:>7.2f}{milliseconds / total:>10.2f}")
    passes = sum(seconds.get(name, 0.0) for name in (*model, "hypergradient"))
    lines.append(f"{config.batch_size / (whole / steps):,.0f} images/s ({per_rank} a rank); not passes of the encoder, "
                 f"nor waiting for data: {1 - (passes + seconds.get('data wait', 0.0)) / whole:.1%}")  # fmt: skip
    if "views" in seconds:
        lines.append(f"views, made beside the step: {1000 * seconds['views'] / steps:.2f} ms of the GPU")
    return lines


def costs(config: Config, ranks: int) -> dict[str, float]:
    """Compute each part's cost in F, where 1 F is a forward pass over the batch."""
    model: dict[str, float] = {"contrastive": method_class(config.method).cost * (1 + config.symmetric)}
    if config.auxiliary != "none":
        model["auxiliary"] = method_class(config.auxiliary, AUXILIARIES).cost(config)
    if config.consistency != "none":
        originals = config.released_originals if config.recipe == "released" else 1
        model |= {"original": originals, "composites": composite_passes(config)}
        if config.mmnn == "learned":
            model["labelled"] = 3 * labelled_batch_size(config, ranks) / config.batch_size / config.mmnn_every
    return model


def _steps(run: "Run", batches: Iterator[_Pair], parts: Parts, count: int) -> None:
    sums: dict[str, torch.Tensor] = {}
    for _ in range(count):
        with parts("data wait"):
            batch, labelled = next(batches)
        metrics = run.step(batch, labelled, run.done)
        with parts("logging"):  # as RunLog adds them up
            sums = {name: value + sums.get(name, 0.0) for name, value in metrics.items()}
        run.done = (run.done + 1) % run.total  # batches never end; turns are the same in every epoch


def _endless(run: "Run") -> Generator[_Pair, None, None]:
    epoch = 0
    while True:
        with closing(run.pairs(epoch, 0)) as batches:
            yield from batches
        epoch = (epoch + 1) % run.config.epochs
