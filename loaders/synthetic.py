"""A loader without data: random crops, made once on the device. The upper bound of any loader's speed, and for tests.

The plan is drawn and its programs are executed all the same, unless ``execute`` is off: then the first batch of a shape
is handed out again and again, and only the order's indices and labels change.
"""

from collections.abc import Generator
from dataclasses import replace
from pathlib import Path
from typing import Unpack

import numpy as np
import torch
from torch import Tensor

from loaders.batch import Batch
from loaders.datasets.dataset import ImageDataset
from loaders.pipeline.delivery import Delivery, DeliveryOptions
from loaders.pipeline.jobs import Job
from loaders.views.order import BatchOrder
from loaders.views.plan import ViewPlan

_CLASSES = 1000
_HEIGHT_WIDTH = 375, 500


def synthetic_dataset(count: int) -> ImageDataset:
    """``count`` images that do not exist, with labels in turn and ImageNet's number of classes and mean size."""
    return ImageDataset(
        Path("synthetic"),
        [f"{i:08d}" for i in range(count)],
        np.arange(count, dtype=np.int64) % _CLASSES,
        [f"{i:04d}" for i in range(_CLASSES)],
        np.tile(np.array(_HEIGHT_WIDTH, np.int32), (count, 1)),
        np.ones(count, np.bool_),
    )


class SyntheticLoader:
    """Batches of noise with the views, programs and indices that real images would have.

    ``workers`` threads make the views on a CPU. Other ``options``: :class:`DeliveryOptions`.
    """

    def __init__(
        self,
        dataset: ImageDataset,
        plan: ViewPlan,
        *,
        order: BatchOrder,
        execute: bool = True,
        **options: Unpack[DeliveryOptions],
    ) -> None:
        self._delivery = Delivery(dataset, plan, order, decoding=False, **options)
        self._execute = execute
        shape = (order.local_batch_size, plan.layout.crops, plan.size, plan.size, 3)
        generator = torch.Generator(self._delivery.device).manual_seed(0)
        self._crops = torch.randint(
            256, shape, dtype=torch.uint8, device=self._delivery.device, generator=generator
        )  # fmt: skip
        self._finished: dict[int, Batch] = {}

    @property
    def steps_per_epoch(self) -> int:
        return self._delivery.order.steps

    def epoch(self, e: int, start_step: int = 0) -> Generator[Batch, None, None]:
        if self._execute:
            return self._delivery.deliver(self._pairs(e, start_step))
        return self._repeat(e, start_step)

    def reading(self) -> list[str]:
        return self._delivery.reading()

    def close(self) -> None:
        self._delivery.close()

    def _pairs(self, epoch: int, start_step: int) -> Generator[tuple[Job, Tensor], None, None]:
        for job in self._delivery.jobs.epoch(epoch, start_step):
            yield job, self._crops[: len(job.planned.index)]

    def _repeat(self, epoch: int, start_step: int) -> Generator[Batch, None, None]:
        order, dataset, device = self._delivery.order, self._delivery.dataset, self._delivery.device
        for step in range(start_step, order.steps):
            index = order.indices(epoch, step)
            if len(index) not in self._finished:
                job = next(self._delivery.jobs.epoch(epoch, step))
                self._finished[len(index)] = self._delivery.finish(job, self._crops[: len(index)])
            label, place = torch.from_numpy(dataset.labels[index]), torch.from_numpy(index.copy())
            yield replace(self._finished[len(index)], label=label.to(device), index=place.to(device))
