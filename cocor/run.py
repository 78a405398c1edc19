"""Put together all parts of a training run on one rank."""

import time
from collections.abc import Generator
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from itertools import islice

import torch

from cocor.config.options import Config
from cocor.data import Data, labelled_loader, open_data, probe_loaders, training_loader
from cocor.distributed.collectives import AsyncMax, World, main_first
from cocor.eval.probes.online import OnlineProbes
from cocor.models import build_auxiliary, build_method, build_target
from cocor.monitor.health import HealthMonitor
from cocor.step.compile import choose
from cocor.step.step import TrainingStep
from loaders.batch import Batch, Loader

_Pair = tuple[Batch, Batch | None]


@dataclass
class Run:
    """All parts of a training run on one rank."""

    config: Config
    world: World
    data: Data
    step: TrainingStep
    loader: Loader
    labelled: Loader | None
    probes: OnlineProbes | None
    health: HealthMonitor
    any_rank: AsyncMax  # signals and checkpoints that are due on any rank
    execution: str  # see cocor.step.compile
    done: int = 0  # finished steps
    probes_are_due: bool = True  # at this very step
    best: float = 0.0  # accuracy of --keep-best
    files: dict[str, str] = field(default_factory=dict)  # of the training images, see checkpoint.describe; main rank
    saved: float = field(default_factory=time.monotonic)  # when the last checkpoint was written
    _stream: Generator[_Pair, None, None] | None = None  # see pairs
    _place: tuple[int, int] | None = None  # epoch and step of its next batch

    @property
    def total(self) -> int:
        return self.config.epochs * self.loader.steps_per_epoch

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()
        for part in (self.loader, self.labelled, self.probes):
            if part is not None:
                part.close()
        self.step.streams.close()

    def pairs(self, epoch: int, first: int) -> Generator[_Pair, None, None]:
        """Yield an epoch's batches from step ``first``, each with a labelled one or None.

        Batches of the next epoch are under way when it ends.
        """
        if self._stream is None or self._place != (epoch, first):
            if self._stream is not None:
                self._stream.close()
            self._stream = self._pairs(epoch, first)
        self._place = None  # if this is left early, the stream is of no use any more
        yield from islice(self._stream, self.loader.steps_per_epoch - first)
        self._place = epoch + 1, 0

    def _pairs(self, epoch: int, first: int) -> Generator[_Pair, None, None]:
        """Yield all batches until the run's end."""
        subsample, number = self.step.subsample, epoch * self.loader.steps_per_epoch + first
        epochs = range(epoch, self.config.epochs)
        with ExitStack() as stack:
            batches = stack.enter_context(closing(self.loader.epochs(epochs, first)))
            if self.labelled is None:
                for batch in batches:
                    yield batch, None
            else:
                before = subsample.labelled_before(number)
                labelled = stack.enter_context(closing(self.labelled.epochs(epochs, before)))
                for step, batch in enumerate(batches, start=number):
                    yield batch, next(labelled) if subsample.has_labelled(step) else None


def build(config: Config, world: World) -> Run:
    """Open the data, on the main rank first, and build networks and loaders."""
    data = main_first(lambda: open_data(config))
    precision = torch.bfloat16 if config.precision == "bf16" else torch.float32
    if world.device.type == "cuda":
        torch.backends.cudnn.benchmark = True
        torch.set_float32_matmul_precision("high")
    method = build_method(config, world)
    loader = training_loader(config, data, world, precision)
    execution = choose(config, world, config.epochs * loader.steps_per_epoch)
    labelled = labelled_loader(config, data, world, precision, loader.steps_per_epoch)
    auxiliary = build_auxiliary(config, method, world)
    target, classes = build_target(config, world), None if labelled is None else len(data.train.classes)
    step = TrainingStep(
        config, method, target, classes, steps_per_epoch=loader.steps_per_epoch, precision=precision,
        auxiliary=auxiliary,
    )  # fmt: skip
    evaluation = probe_loaders(config, data, world, precision) if world.main else None
    probes = OnlineProbes(config, *evaluation, precision) if evaluation is not None else None
    health = HealthMonitor(config, world, data.train.names)
    return Run(config, world, data, step, loader, labelled, probes, health, AsyncMax(world.device), execution)
