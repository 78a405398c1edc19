"""A cell of the table: one loader at one stage, measured in processes of its own, one a GPU.

So no cell inherits memory pools, threads or compiled kernels from another, and a loader that crashes or hangs costs one
row only.
"""

import gc
import os
import socket
import statistics
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from cocor.config.options import Execution
from cocor.distributed.collectives import World, init, shutdown
from cocor.step.cudagraph import WARM_UP
from images import Images, store
from loaders.datasets.stored import open_stored
from processes import in_processes
from sources import Contender, Request, open_source, premade
from stages import Stage, views_of
from timing import Window, completed, milliseconds, time_together, time_windows

_CONVERTING = 600.0  # seconds for the file that FFCV reads
_PATIENCE = 150.0  # seconds for a rank beyond the timed ones: starting, building, warming up
_COMPILING = 600.0  # the same where it compiles, perhaps without anything in the compiler's cache
_GIB = 2**30


@dataclass(frozen=True)
class Settings:
    """What all cells have in common. ``batch_size`` is over all ranks, ``workers`` is that of each."""

    on_gpu: bool
    ranks: int
    batch_size: int
    size: int
    workers: int
    seconds: float
    hw_decoder_load: float
    backbone: str
    execution: Execution = "eager"


@dataclass(frozen=True)
class Measured:
    """A cell's figures, over all ranks. See the docstring of ``throughput.py``."""

    loader: Contender
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
    note: str = ""


@dataclass(frozen=True)
class Absent:
    """Why a cell has no figures."""

    loader: Contender
    stage: Stage
    reason: str


@dataclass(frozen=True)
class _Rank:
    """What one rank measured."""

    windows: list[Window]
    reserved: float | None = None
    used: float | None = None
    premade: float | None = None
    note: str = ""


def measure(contender: Contender, stage: Stage, images: Images, settings: Settings) -> Measured | Absent:
    """Measure a cell on all ranks at once."""
    beton = _beton(images) if contender == "ffcv" else None
    if isinstance(beton, str):
        return Absent(contender, stage, beton)
    port = _free_port()
    jobs = [(_measure_rank, (contender, stage, images, beton, settings, rank, port)) for rank in range(settings.ranks)]
    compiles = stage == "step" and settings.execution in ("compiled", "fused")
    answers = in_processes(jobs, 4 * settings.seconds + (_COMPILING if compiles else _PATIENCE))
    failures = [answer for answer in answers if isinstance(answer, str)]
    if failures:
        return Absent(contender, stage, failures[0])
    return _combine(contender, stage, answers)


@cache
def _beton(images: Images) -> Path | str:
    """The file from which the FFCV loader reads the images, or why there is none."""
    (answer,) = in_processes([(store, (images,))], _CONVERTING)
    return answer


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _measure_rank(
    contender: Contender, stage: Stage, images: Images, beton: Path | None, settings: Settings, rank: int, port: int
) -> _Rank:
    if settings.ranks > 1:
        _announce(rank, settings.ranks, port)
    world = init(settings.on_gpu)
    request = Request(
        contender,
        stage,
        images.dataset() if beton is None else open_stored(beton),
        settings.batch_size // settings.ranks,
        settings.size,
        world.device,
        torch.bfloat16 if settings.on_gpu else torch.float32,
        settings.workers,
        settings.hw_decoder_load,
        rank,
        settings.ranks,
    )
    torch.set_num_threads(1)  # loaders have threads of their own, and torch's spin while they wait for a processor
    result = _measure_step(request, world, settings) if stage == "step" else _measure_loader(request, settings.seconds)
    shutdown()
    return result


def _announce(rank: int, ranks: int, port: int) -> None:
    """Tell ``cocor.distributed.collectives`` who this process is, as torchrun does."""
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip


def _measure_loader(request: Request, seconds: float) -> _Rank:
    with closing(open_source(request)) as source:
        counts = completed((count for count, _ in source.batches), request.device)
        windows = time_windows(counts, seconds, source.burst)
        return _Rank(windows, *_gpu_memory(request.device), note=source.note)


def _measure_step(request: Request, world: World, settings: Settings) -> _Rank:
    """Training on a premade batch, on the loader's batches, and on the premade one again, as clocks drift with heat."""
    from trainer import Trainer

    with closing(open_source(request)) as source:  # first, as it may fail for what is missing
        trainer = Trainer(request, world, settings.backbone, settings.execution)
        before = _premade_seconds(request, world, trainer, settings.seconds / 2)
        _forget_memory(request.device)
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


def _premade_seconds(request: Request, world: World, trainer: Any, seconds: float) -> float:
    with closing(premade(request)) as source, closing(trainer.train(source, with_labelled_loader=False)) as trained:
        windows = _time_steps(completed(trained, request.device), seconds, world)
        return request.batch_size / statistics.median(w.rate for w in windows)


def _forget_memory(device: torch.device) -> None:
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def _gpu_memory(device: torch.device) -> tuple[float | None, float | None]:
    """GiB: the most that torch has reserved, and what is in use on the whole card now (DALI's pools do not shrink)."""
    if device.type != "cuda":
        return None, None
    free, total = torch.cuda.mem_get_info(device)
    return torch.cuda.max_memory_reserved(device) / _GIB, (total - free) / _GIB


def _combine(contender: Contender, stage: Stage, ranks: list[_Rank]) -> Measured:
    """Rates and cores are added up over ranks; latencies and memory are those of the worst rank."""
    rounds = [sum(w.rate for w in together) for together in zip(*(rank.windows for rank in ranks), strict=False)]
    rate = statistics.median(rounds)
    cores = sum(statistics.median(w.cores for w in rank.windows) for rank in ranks)
    used, reserved = (
        max((value for rank in ranks if (value := getattr(rank, name)) is not None), default=None)
        for name in ("used", "reserved")
    )
    premade_ms = share = None
    if stage == "step":
        premade_ms = 1000 * statistics.mean(rank.premade for rank in ranks if rank.premade is not None)
        step_ms = 1000 * statistics.mean(_step_seconds(rank) for rank in ranks)
        share = 1 - premade_ms / step_ms
    return Measured(
        contender,
        stage,
        samples_per_s=rate,
        spread=(max(rounds) - min(rounds)) / rate,
        views_per_s=rate * views_of(stage),
        samples_per_s_per_core=rate / max(cores, 1e-3),
        cores_busy=cores,
        batch_ms_p50=max(milliseconds(rank.windows, 50) for rank in ranks),
        batch_ms_p99=max(milliseconds(rank.windows, 99) for rank in ranks),
        batches=sum(len(window.intervals) for window in ranks[0].windows),
        windows=len(rounds),
        gpu_reserved_gib=reserved,
        gpu_used_gib=used,
        premade_ms=premade_ms,
        gpu_share=share,
        note=ranks[0].note,
    )


def _step_seconds(rank: _Rank) -> float:
    return statistics.median(window.seconds / len(window.intervals) for window in rank.windows)
