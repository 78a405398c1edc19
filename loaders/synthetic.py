"""Synthetic loader: random crops, made once, as the bound of any loader's speed.

The plan is drawn and its programs are executed all the same, unless ``execute`` is off: then the first batch of a shape
is handed out again and again, and only the order's indices and labels change.
"""

from collections.abc import Generator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Unpack

import numpy as np
import torch
from torch import Tensor

from loaders.batch import Batch
from loaders.datasets.dataset import ImageDataset
from loaders.pipeline.jobs import Job
from loaders.pipeline.loader import LoaderOptions, PipelineLoader
from loaders.views.order import BatchOrder
from loaders.views.plan import ViewPlan

_CLASSES = 1000
_HEIGHT_WIDTH = 375, 500


def synthetic_dataset(count: int) -> ImageDataset:
    """Invent ``count`` images with ImageNet's mean size and number of classes."""
    names, classes = [f"{i:08d}" for i in range(count)], [f"{i:04d}" for i in range(_CLASSES)]
    labels, sizes = np.arange(count, dtype=np.int64) % _CLASSES, np.tile(np.array(_HEIGHT_WIDTH, np.int32), (count, 1))
    return ImageDataset(Path("synthetic"), names, labels, classes, sizes, np.ones(count, np.bool_))


class SyntheticLoader(PipelineLoader):
    """Batches of noise with the views, programs and indices of real images."""

    views_share = 1.0  # nothing is decoded

    def __init__(
        self, dataset: ImageDataset, plan: ViewPlan, *, order: BatchOrder, execute: bool = True,
        **options: Unpack[LoaderOptions]
    ) -> None:  # fmt: skip
        super().__init__(dataset, plan, order=order, **options)
        self._execute = execute
        shape = (order.local_batch_size, plan.layout.crops, plan.size, plan.size, 3)
        generator = torch.Generator(self.device).manual_seed(0)
        self._noise = torch.randint(256, shape, dtype=torch.uint8, device=self.device, generator=generator)
        self._finished: dict[int, Batch] = {}

    def epochs(self, epochs: range, start_step: int = 0) -> Generator[Batch, None, None]:
        return super().epochs(epochs, start_step) if self._execute else self._repeat(epochs, start_step)

    def crops(self, epochs: range, start_step: int) -> Generator[tuple[Job, Tensor], None, None]:
        for job in self.jobs.epochs(epochs, start_step):
            yield job, self._noise[: len(job.planned.index)]

    def _repeat(self, epochs: range, start_step: int) -> Generator[Batch, None, None]:
        places = ((epoch, step) for epoch in epochs for step in range(self.order.steps))
        for epoch, step in islice(places, start_step, None):
            index = self.order.indices(epoch, step)
            if len(index) not in self._finished:
                job = next(self.jobs.epochs(range(epoch, epoch + 1), step))
                self._finished[len(index)] = self.finish(job, self._noise[: len(index)])
            label, place = torch.from_numpy(self.dataset.labels[index]), torch.from_numpy(index.copy())
            yield replace(self._finished[len(index)], label=label.to(self.device), index=place.to(self.device))
