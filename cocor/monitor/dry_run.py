"""Run ``--dry-run``: make two steps, say what a real run would do and cost."""

import resource
import sys
import time
from dataclasses import fields
from statistics import fmean
from typing import TYPE_CHECKING

import torch
import yaml
from torch import Tensor

from cocor.distributed.collectives import barrier
from cocor.log import duration
from cocor.step.compile import executable
from cocor.step.cudagraph import WARM_UP
from loaders.batch import Batch
from loaders.text import counted

if TYPE_CHECKING:  # run.py imports this folder
    from cocor.run import Run

STEPS = 2
_MOST_TURNS = 20  # steps whose mean time is taken, if the MMNN learns in some of them only


def report(run: "Run") -> None:
    """Make a few steps of ``run``; print shapes, memory, time and configuration."""
    seconds = []
    batches = run.pairs(0, 0)
    batch = None
    make_step = executable(run.step, run.execution)
    turns = min(run.config.mmnn_every, _MOST_TURNS) if run.labelled is not None else 1
    steps = (STEPS + (WARM_UP if run.execution in ("graph", "fused") else 0)) * turns
    for number, (batch, labelled) in zip(range(steps), batches, strict=False):
        begin = time.perf_counter()
        metrics = make_step(batch, labelled, number)
        loss = metrics["loss"].item()  # waits for the device
        seconds.append(time.perf_counter() - begin)
    batches.close()
    barrier()
    assert batch is not None
    if run.world.main:
        print(yaml.safe_dump(run.config.to_dict(), sort_keys=False), end="")
        batch, _ = run.step.subsample(batch, None, 0)  # what steps train on
        print("\n".join(["", *_shapes(batch), *_model(run), f"loss after {len(seconds)} steps: {loss:.4f}"]))
        print(f"memory: {_memory(run.world.device)}")
        # The first step pays for warming up; loaders run ahead, so the last ones show the rate of the networks.
        rate = fmean(seconds[-turns:])
        whole = f"{counted(run.total, 'step')}, about {duration(rate * run.total)}"
        print(f"time: {rate:.3f} s a step, {whole} if data keeps up")
        sys.stdout.flush()


def _shapes(batch: Batch) -> list[str]:
    lines = []
    for field in fields(batch):
        tensor: Tensor | None = getattr(batch, field.name)
        if tensor is None:
            continue
        lines.append(f"{field.name}: {tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')} {tensor.device}")
    return lines


def _model(run: "Run") -> list[str]:
    method = run.step.method
    trained = sum(p.numel() for p in run.step.parameters)
    backbone = sum(p.numel() for p in method.backbone.parameters())
    return [
        f"{run.config.backbone}: {backbone / 1e6:.1f} M parameters; {run.config.method} trains {trained / 1e6:.1f} M",
        f"steps: {run.loader.steps_per_epoch:,} an epoch, {counted(run.config.epochs, 'epoch')}, "
        f"{counted(run.world.size, 'rank')}",
    ]


def _memory(device: torch.device) -> str:
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        peak = torch.cuda.max_memory_allocated(device)
        used = f"{(total - free) / 2**30:.1f} of {total / 2**30:.0f} GiB in use"
        return f"{peak / 2**30:.1f} GiB of tensors at the peak, {used}"
    return f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.1f} GiB at the peak"
