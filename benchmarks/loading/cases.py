"""Case: one contender at one stage, measured in processes of its own.

So no case inherits memory pools, threads or compiled kernels from another, and a loader that crashes or hangs costs
one row only. There is one process a GPU.
"""

import gc
import itertools
import os
import socket
import statistics
from collections.abc import Generator, Iterator
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.images import store
from benchmarks.loading import first_reads
from benchmarks.loading.contenders import CONTENDERS, Request, Source, labelled, premade, synthetic_batch
from benchmarks.loading.stages import Stage, views_of
from benchmarks.loading.timing import Window, completed, milliseconds, time_together, time_windows
from benchmarks.processes import in_processes
from cocor.config.options import Config, Execution, labelled_batch_size
from cocor.config.resolve import resolve
from cocor.data import labelled_plan
from cocor.distributed.collectives import World, init, shutdown
from cocor.models import build_method, build_target
from cocor.step.compile import choose, executable
from cocor.step.cudagraph import WARM_UP
from cocor.step.step import TrainingStep
from loaders.datasets.dataset import ImageDataset
from loaders.datasets.stored import open_stored
from loaders.views.order import CyclicOrder

# Seconds to convert the file that FFCV reads, and for a rank beyond the timed ones: to start, build and warm up, or to
# compile, perhaps without anything in the compiler's cache.
_CONVERTING, _PATIENCE, _COMPILING = 600.0, 150.0, 600.0
_GIB = 2**30
_STEPS = 100_000  # of an epoch; the learning-rate schedule must not end


@dataclass(frozen=True)
class Settings:
    """Settings of a case; ``batch_size`` is over all ranks, ``workers`` of each.

    ``latency_ms``: how late files come from the disk; None: they come from the page cache.
    """

    on_gpu: bool
    ranks: int
    batch_size: int
    size: int
    workers: int
    seconds: float
    hw_decoder_load: float
    backbone: str
    execution: Execution = "eager"
    latency_ms: float | None = None


@dataclass(frozen=True)
class Measured:
    """Figures of a case, over all ranks; see ``throughput.py``."""

    loader: str
    stage: Stage
    samples_per_s: float
    spread: float
    views_per_s: float
    samples_per_s_per_core: float
    cores_busy: float
    batch_ms_p50: float
    batch_ms_p99: float
    batches: int
    windows: int
    gpu_reserved_gib: float | None = None
    gpu_used_gib: float | None = None
    premade_ms: float | None = None
    gpu_share: float | None = None
    latency_ms: float | None = None
    note: str = ""


@dataclass(frozen=True)
class Absent:
    """Reason why a case has no figures."""

    loader: str
    stage: Stage
    reason: str
    latency_ms: float | None = None


@dataclass(frozen=True)
class _Rank:
    """Figures of one rank; ``premade`` is in seconds a step."""

    windows: list[Window]
    reserved: float | None = None
    used: float | None = None
    premade: float = 0.0
    note: str = ""


def measure(contender: str, stage: Stage, images: ImageDataset, settings: Settings) -> Measured | Absent:
    """Measure a case on all ranks at once."""
    source = _beton(images) if contender == "ffcv" else images
    if isinstance(source, str):
        return Absent(contender, stage, source, settings.latency_ms)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = int(listener.getsockname()[1])
    jobs = [(_measure_rank, (contender, stage, source, settings, rank, port)) for rank in range(settings.ranks)]
    compiles = stage == "step" and settings.execution in ("compiled", "fused")
    answers = in_processes(jobs, 4 * settings.seconds + (_COMPILING if compiles else _PATIENCE))
    failures = [answer for answer in answers if isinstance(answer, str)]
    if failures:
        return Absent(contender, stage, failures[0], settings.latency_ms)
    return replace(_combine(contender, stage, answers), latency_ms=settings.latency_ms)


@cache
def _beton(images: ImageDataset) -> Path | str:
    """Convert the images for the FFCV loader, or say why that fails."""
    return in_processes([(store, (images,))], _CONVERTING)[0]


def _measure_rank(
    contender: str, stage: Stage, source: ImageDataset | Path, settings: Settings, rank: int, port: int
) -> _Rank:
    """Measure one rank on a data set, or on the ``.beton`` file at a path."""
    if settings.ranks > 1:  # as torchrun tells its ranks
        os.environ |= {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(settings.ranks),
            "LOCAL_WORLD_SIZE": str(settings.ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        }  # fmt: skip
    world = init(settings.on_gpu)
    request = Request(
        contender, stage, open_stored(source) if isinstance(source, Path) else source,
        settings.batch_size // settings.ranks, settings.size, world.device,
        torch.bfloat16 if settings.on_gpu else torch.float32, settings.workers, settings.hw_decoder_load,
        rank, settings.ranks,
    )  # fmt: skip
    if settings.latency_ms is not None:
        first_reads.begin(request.dataset.root, settings.latency_ms)
    torch.set_num_threads(1)  # loaders have threads of their own, and torch's spin while they wait for a processor
    result = _measure_step(request, world, settings) if stage == "step" else _measure_loader(request, settings.seconds)
    shutdown()
    return result


def _measure_loader(request: Request, seconds: float) -> _Rank:
    with closing(CONTENDERS[request.contender].open(request)) as source:
        counts = completed((count for count, _ in source.batches), request.device)
        windows = time_windows(counts, seconds, source.burst)
        return _Rank(windows, *_gpu_memory(request.device), note=source.note)


def _measure_step(request: Request, world: World, settings: Settings) -> _Rank:
    """Time training on premade batches before and after those of the loader."""
    with closing(CONTENDERS[request.contender].open(request)) as source:  # first, as it may fail for what is missing
        trainer = Trainer(request, world, settings.backbone, settings.execution)
        before = _premade_seconds(request, world, trainer, settings.seconds / 2)
        if request.device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        with closing(trainer.train(source, with_labelled_loader=True)) as trained:
            counts = completed(trained, request.device)
            windows = _time_steps(counts, settings.seconds, world, source.burst)
            memory = _gpu_memory(request.device)
    after = _premade_seconds(request, world, trainer, settings.seconds / 2)
    return _Rank(windows, *memory, premade=(before + after) / 2, note=source.note)


def _time_steps(counts: Iterator[int], seconds: float, world: World, burst: int = 1) -> list[Window]:
    if world.size == 1:
        return time_windows(counts, seconds, burst, warm_up=WARM_UP + 1)

    def agree(number: int) -> int:
        shared = torch.tensor(number, device=world.device)
        dist.broadcast(shared, src=0)
        return int(shared)

    return time_together(counts, seconds, agree, burst)


def _premade_seconds(request: Request, world: World, trainer: "Trainer", seconds: float) -> float:
    with closing(premade(request)) as source, closing(trainer.train(source, with_labelled_loader=False)) as trained:
        windows = _time_steps(completed(trained, request.device), seconds, world)
        return request.batch_size / statistics.median(w.rate for w in windows)


def _gpu_memory(device: torch.device) -> tuple[float | None, float | None]:
    """Measure GiB: torch's peak reservation, and what is in use on the whole card."""
    if device.type != "cuda":
        return None, None
    free, total = torch.cuda.mem_get_info(device)
    return torch.cuda.max_memory_reserved(device) / _GIB, (total - free) / _GIB


def _combine(contender: str, stage: Stage, ranks: list[_Rank]) -> Measured:
    """Add up rates and cores over ranks; take latency and memory of the worst."""
    rounds = [sum(w.rate for w in together) for together in zip(*(rank.windows for rank in ranks), strict=False)]
    rate = statistics.median(rounds)
    cores = sum(statistics.median(w.cores for w in rank.windows) for rank in ranks)
    premade_ms = share = None
    if stage == "step":
        premade_ms = 1000 * statistics.mean(rank.premade for rank in ranks)
        step_ms = 1000 * statistics.mean(
            statistics.median(window.seconds / len(window.intervals) for window in rank.windows) for rank in ranks
        )
        share = 1 - premade_ms / step_ms
    p50, p99 = (max(milliseconds(rank.windows, percent) for rank in ranks) for percent in (50, 99))
    views = CONTENDERS[contender].views or views_of(stage)
    return Measured(
        contender, stage, samples_per_s=rate, spread=(max(rounds) - min(rounds)) / rate,
        views_per_s=rate * views, samples_per_s_per_core=rate / max(cores, 1e-3),
        cores_busy=cores, batch_ms_p50=p50, batch_ms_p99=p99, windows=len(rounds), premade_ms=premade_ms,
        batches=sum(len(window.intervals) for window in ranks[0].windows), gpu_share=share, note=ranks[0].note,
        gpu_reserved_gib=max((rank.reserved for rank in ranks if rank.reserved is not None), default=None),
        gpu_used_gib=max((rank.used for rank in ranks if rank.used is not None), default=None),
    )  # fmt: skip


class Trainer:
    """Networks and optimisers of a run over the images of ``request``, on ``world``."""

    def __init__(self, request: Request, world: World, backbone: str, execution: Execution = "eager") -> None:
        torch.backends.cudnn.benchmark = world.device.type == "cuda"
        torch.set_float32_matmul_precision("high")
        self._request, self._world = request, world
        self.config = _config(request, world, backbone)
        classes = len(request.dataset.classes)
        method, target = build_method(self.config, world), build_target(self.config, world)
        step = TrainingStep(self.config, method, target, classes, steps_per_epoch=_STEPS, precision=request.dtype)
        self._execute = executable(step, choose(replace(self.config, execution=execution), world, _STEPS))
        self._number = 0

    def train(self, source: Source, with_labelled_loader: bool) -> Generator[int]:
        """Train on the batches of ``source`` and yield their sizes."""
        plan, world, size = labelled_plan(self.config), self._world, labelled_batch_size(self.config, self._world.size)
        order = CyclicOrder(len(self._request.dataset), size, steps=_STEPS, rank=world.rank, world_size=world.size)
        loader = labelled(self._request, plan, order) if with_labelled_loader else None
        with nullcontext() if loader is None else closing(loader):
            one = None if loader else synthetic_batch(self._request, plan, order)
            classified_batches = loader.epoch(0) if loader else itertools.repeat(one)
            for (count, batch), classified in zip(source.batches, classified_batches, strict=False):
                assert batch is not None
                self._execute(batch, classified, self._number)
                self._number += 1
                yield count


def _config(request: Request, world: World, backbone: str) -> Config:
    size, most = request.batch_size, max(1, 8 // world.size)
    groups = max(n for n in range(1, most + 1) if size % n == 0 and (size // n >= 2 or n == 1))  # of keys, equal parts
    return resolve({
        "backbone": backbone, "image_size": request.size, "batch_size": size * world.size,
        "labelled_batch_size": max(2, size // 4) * world.size, "key_bn_splits": world.size * groups,
        "queue_size": 65536 if world.device.type == "cuda" else 4096,
        "precision": "fp32" if request.dtype == torch.float32 else "bf16",
    })  # fmt: skip
