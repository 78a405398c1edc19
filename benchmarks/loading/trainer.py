"""Training of the last stage: steps of MoCo + CoCor with their labelled batches, as ``cocor-train`` makes them."""

import itertools
from collections.abc import Generator
from contextlib import closing, nullcontext
from dataclasses import replace
from typing import Any

import torch

from benchmarks.loading.contenders import Request, Source, labelled, synthetic_batch
from cocor.config.options import Config, Execution, labelled_batch_size
from cocor.config.resolve import resolve
from cocor.data import labelled_plan
from cocor.distributed.collectives import World
from cocor.models import build_method, build_target
from cocor.step.compile import choose, executable
from cocor.step.step import TrainingStep
from loaders.views.order import CyclicOrder

_STEPS = 100_000  # of an epoch; the learning-rate schedule must not end


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
        """Train on the batches of ``source`` and yield their sizes. Labelled batches come from a loader of the same
        kind, or one finished batch is used again and again."""
        plan, order = labelled_plan(self.config), self._labelled_order()
        loader = labelled(self._request, plan, order) if with_labelled_loader else None
        with nullcontext() if loader is None else closing(loader):
            one = None if loader else synthetic_batch(self._request, plan, order)
            classified_batches = loader.epoch(0) if loader else itertools.repeat(one)
            for (count, batch), classified in zip(source.batches, classified_batches, strict=False):
                assert batch is not None
                self._execute(batch, classified, self._number)
                self._number += 1
                yield count

    def _labelled_order(self) -> CyclicOrder:
        size = labelled_batch_size(self.config, self._world.size)
        dataset, world = self._request.dataset, self._world
        return CyclicOrder(len(dataset), size, steps=_STEPS, rank=world.rank, world_size=world.size)


def _config(request: Request, world: World, backbone: str) -> Config:
    values: dict[str, Any] = {
        "backbone": backbone,
        "image_size": request.size,
        "batch_size": request.batch_size * world.size,
        "labelled_batch_size": max(2, request.batch_size // 4) * world.size,
        "queue_size": 65536 if world.device.type == "cuda" else 4096,
        "key_bn_splits": world.size * _bn_groups(request.batch_size, most=max(1, 8 // world.size)),
        "precision": "fp32" if request.dtype == torch.float32 else "bf16",
    }
    return resolve(values)


def _bn_groups(batch_size: int, most: int) -> int:
    """Most BatchNorm groups of the keys that divide the batch into equal parts of 2 or more."""
    return max(n for n in range(1, most + 1) if batch_size % n == 0 and (batch_size // n >= 2 or n == 1))
