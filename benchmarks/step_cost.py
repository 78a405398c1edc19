"""The figures of one row of :mod:`step`: the training step, its encoder passes alone, and the bare backbone, each timed
on one batch of noise that lies on the device."""

import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from cocor.config.options import Config, Execution, labelled_batch_size
from cocor.distributed.collectives import World
from cocor.methods.base import batch_statistics_only
from cocor.models import build_method, build_target
from cocor.monitor.profile import costs
from cocor.step.compile import choose, executable
from cocor.step.cudagraph import WARM_UP
from cocor.step.step import TrainingStep
from loaders.batch import Batch

CLASSES, WINDOWS, STEPS_PER_EPOCH = 1000, 3, 10_000


def measure(
    config: Config, execution: Execution, steps: int, device: torch.device, parallel: bool | None = None
) -> dict[str, Any]:
    """All figures of one row, from windows of ``steps`` steps, rounded up to whole turns. ``parallel``: see
    :class:`cocor.step.cudagraph.GraphedStep`. UserError for an ``execution`` of which this machine is not capable."""
    begin = time.perf_counter()
    precision = torch.bfloat16 if config.precision == "bf16" else torch.float32
    world = World(0, 0, 1, device)
    method, target = build_method(config, world), build_target(config, world)
    step = TrainingStep(config, method, target, CLASSES, steps_per_epoch=STEPS_PER_EPOCH, precision=precision)
    batch = noise(config, config.batch_size, config.image_size, device, precision)
    labelled = noise(config, labelled_batch_size(config, 1), config.image_size, device, precision, plain=True)
    run = executable(step, choose(replace(config, execution=execution), world, steps), parallel)
    numbers = itertools.count()
    for _ in range((WARM_UP + 2) * config.mmnn_every):
        run(batch, labelled, next(numbers))
    _wait(device)
    start = time.perf_counter() - begin
    window = -(-steps // step.subsample.cycle) * step.subsample.cycle
    seconds, spread = timed(lambda: run(batch, labelled, next(numbers)), window, device)
    allocated = reserved = None
    if device.type == "cuda":
        allocated, reserved = torch.cuda.max_memory_allocated() / 2**30, torch.cuda.max_memory_reserved() / 2**30
    recorded = execution in ("graph", "fused")
    passes = seconds_of_passes(step, batch, labelled, recorded, steps)
    card = timed(_warmed_up(lambda: forward_backward(step, batch.original), recorded, device), steps, device)[0]
    units = len(batch.index) * sum(costs(config, 1).values()) / seconds
    return {
        "method": config.method, "cocor": target is not None, "execution": execution, "batch_size": config.batch_size,
        "images_per_s": len(batch.index) / seconds, "spread": spread, "step_ms": 1000 * seconds,
        "forward_equivalents_per_s": units, "card_images_per_s": len(batch.index) / card,
        "of_card": units / (3 * len(batch.index) / card), "other": 1 - passes / seconds,
        "memory_gib": allocated, "reserved_gib": reserved, "start_s": start,
    }  # fmt: skip


def noise(
    config: Config, count: int, size: int, device: torch.device, dtype: torch.dtype, plain: bool = False
) -> Batch:
    """A batch of Gaussian noise; ``plain``: with the original alone, as labelled batches have it."""
    generator = torch.Generator(device).manual_seed(count)
    lengths = 0 if plain or config.consistency == "none" else len(config.lengths)

    def images(*shape: int) -> Tensor:
        values = torch.randn(*shape, size, size, 3, device=device, dtype=dtype, generator=generator)
        return values.movedim(-1, -3)

    composition = torch.zeros(lengths, count, 14, dtype=torch.uint8, device=device)
    for at in range(lengths):
        composition[at, :, at % 14] = config.lengths[at]
    label = torch.arange(count, device=device) % CLASSES
    return Batch(images(0 if plain else 2, count), images(count), images(lengths, count), composition, label, label)


def seconds_of_passes(step: TrainingStep, batch: Batch, labelled: Batch, recorded: bool, steps: int) -> float:
    """Seconds of :func:`all_passes` a step, the mean over steps with a labelled batch and without."""
    shared, every = step.share(batch, labelled, 0)[0], step.config.mmnn_every

    def seconds(labelled: Batch | None) -> float:
        work = _warmed_up(lambda: all_passes(step, shared, labelled), recorded, step.device)
        return timed(work, steps, step.device)[0]

    guided = seconds(labelled)
    return guided if every == 1 else (guided + (every - 1) * seconds(None)) / every


def all_passes(step: TrainingStep, batch: Batch, labelled: Batch | None) -> None:
    """The encoder's forward and backward passes of one step, with the contrastive loss, and nothing else."""
    method, parameters = step.method, step.parameters
    backbone = [p for p in method.backbone.parameters() if p.requires_grad]
    if step.target is not None:
        with step.autocast():
            method.embed_original(batch.original)
        for at, images in enumerate(batch.composites):
            with step.streams.beside(at):
                with step.autocast():
                    output = method.embed_composite(images).sum()
                torch.autograd.grad(output, parameters, allow_unused=True)
    with step.autocast():
        loss = method.contrastive(batch.views, batch.label)
    torch.autograd.grad(loss, parameters, allow_unused=True)
    step.streams.join()
    if step.outer is not None and labelled is not None:
        with step.autocast(), batch_statistics_only(method.backbone):
            output = method.backbone(labelled.original).sum()
        torch.autograd.grad(output, backbone)


def forward_backward(step: TrainingStep, images: Tensor) -> None:
    """One pass of the backbone, forward and back."""
    backbone = step.method.backbone
    with step.autocast(), batch_statistics_only(backbone):
        output = backbone(images).sum()
    torch.autograd.grad(output, [p for p in backbone.parameters() if p.requires_grad])


def _warmed_up(work: Callable[[], object], recorded: bool, device: torch.device) -> Callable[[], object]:
    """``work`` after two calls; if ``recorded``, its replay as a CUDA graph."""
    stream = torch.cuda.Stream(device) if recorded else None
    for _ in range(2):
        if stream is None:
            work()
        else:
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                work()
            torch.cuda.synchronize()
    if stream is None:
        return work
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        work()
    return graph.replay


def timed(work: Callable[[], object], steps: int, device: torch.device) -> tuple[float, float]:
    """Median seconds of one call over windows of ``steps`` calls, and the range over the median."""
    windows = []
    for _ in range(WINDOWS):
        _wait(device)
        begin = time.perf_counter()
        for _ in range(steps):
            work()
        _wait(device)
        windows.append((time.perf_counter() - begin) / steps)
    middle = statistics.median(windows)
    return middle, (max(windows) - min(windows)) / middle


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
