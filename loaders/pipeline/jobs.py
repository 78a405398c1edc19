"""Jobs, from the plan: what a loader decodes and the executor makes of a batch.

    BatchOrder + ViewPlan -> samples of a step -> Job (which images, boxes, programs)

If an image turns out unusable while a loader runs that may skip it, a stand-in replaces the sample (see
:meth:`loaders.views.order.BatchOrder.stand_ins`), with the stand-in's own label and index and the views that the plan
draws for it. So a batch is a function of the plan and of the set of unusable images.
"""

from collections.abc import Callable, Generator, Mapping
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from loaders.datasets.dataset import ImageDataset, OnError
from loaders.errors import UnusableImage, UserError
from loaders.kernels.lower import lower
from loaders.text import printable
from loaders.views.order import MOST_STAND_INS, BatchOrder
from loaders.views.parameters import view_parameters
from loaders.views.plan import PlannedBatch, ViewPlan

Faults = Mapping[int, UserError]
"""What is wrong with the samples of a batch, by their places in it."""


@dataclass(frozen=True)
class Job:
    """A planned batch of B samples, as the executor takes it.

    ``tensors``, of C crops, T views of up to P ops and L composites: flips (B, C) uint8, codes (B, T, P) uint8, params
    (B, T, P, 8) int32, composition (L, B, 14) uint8, label (B,) int64, index (B,) int64, and if the plan asks for them
    parameters (V, B, 16) float32.
    """

    epoch: int
    step: int
    planned: PlannedBatch
    tensors: dict[str, Tensor]


class Jobs:
    """Make the jobs of one loader, in pinned memory if ``pinned``."""

    def __init__(
        self, dataset: ImageDataset, plan: ViewPlan, order: BatchOrder, on_error: OnError, pinned: bool
    ) -> None:
        if order.length != len(dataset):
            raise ValueError(f"the order covers {order.length} samples, the data set has {len(dataset)}")
        self._dataset, self._plan, self._order, self._on_error, self._pinned = dataset, plan, order, on_error, pinned

    def epochs(self, epochs: range, start_step: int = 0) -> Generator[Job, None, None]:
        """Yield the jobs of ``epochs``, of the first from ``start_step`` on."""
        for epoch in epochs:
            self._retry_unusable()
            for step in range(start_step if epoch == epochs.start else 0, self._order.steps):
                yield self._job(epoch, step, *self._samples(epoch, step))

    def renewed(self, job: Job) -> Job:
        """Renew ``job`` without samples that have turned out unusable meanwhile."""
        index, passes = self._samples(job.epoch, job.step)
        return job if np.array_equal(index, job.planned.index) else self._job(job.epoch, job.step, index, passes)

    def mend(self, job: Job, faults: Faults, decode: Callable[[Job, list[int]], Faults]) -> Job:
        """Give ``job`` stand-ins for samples with ``faults``, or raise one of these.

        ``decode(job, places)`` makes the crops at these places again and returns the faults that it meets.
        """
        while faults:
            for place, fault in faults.items():
                if not isinstance(fault, UnusableImage):
                    raise fault
                self.skip(int(job.planned.index[place]), fault)
            before, job = job, self.renewed(job)
            changed = np.flatnonzero(job.planned.index != before.planned.index).tolist()
            faults = decode(job, sorted({*changed, *faults}))
        return job

    def skip(self, index: int, fault: UnusableImage) -> None:
        """Record that sample ``index`` is unusable; if that is to stop, raise it."""
        if self._on_error == "stop":
            raise fault
        self._dataset.bad_samples.skip(self._dataset.names[index], str(fault))

    def _unusable(self) -> frozenset[str]:
        return self._dataset.bad_samples.unusable if self._on_error == "skip" else frozenset()

    def _samples(self, epoch: int, step: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Find the samples of a step and their passes, with stand-ins for unusable ones."""
        index, passes = self._order.indices(epoch, step), self._order.passes(epoch, step)
        unusable = self._unusable()
        if unusable:
            index, passes = index.copy(), passes.copy()
            names = self._dataset.names
            for place in [place for place, i in enumerate(index) if names[i] in unusable]:
                others = self._order.stand_ins(epoch, step, place)
                found = next((other for other in others if names[other[0]] not in unusable), None)
                if found is None:
                    raise UserError(
                        f"{printable(self._dataset.root)}: {printable(names[index[place]])} cannot be used, nor can "
                        f"any of up to {MOST_STAND_INS} others in its place; is the disk with the data still there?"
                    )
                index[place], passes[place] = found
        return index, passes

    def _job(self, epoch: int, step: int, index: NDArray[np.int64], passes: NDArray[np.int64]) -> Job:
        sizes = self._dataset.sizes[index]
        planned = self._plan.draw(passes, index, sizes)
        arrays = {
            "flips": planned.flips,
            "codes": planned.codes,
            "params": lower(planned.codes, planned.magnitudes, self._plan.size),
            "composition": planned.composition,
            "label": self._dataset.labels[index],
            "index": planned.index.copy(),  # the order is read-only memory
        }
        if self._plan.parameters:
            arrays["parameters"] = view_parameters(planned, sizes, self._plan.layout.contrastive)
        tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
        if self._pinned:
            tensors = {name: tensor.pin_memory() for name, tensor in tensors.items()}
        return Job(epoch, step, planned, tensors)

    def _retry_unusable(self) -> None:
        """Decode the unusable images once more: a file may come back at a new epoch."""
        unusable = self._unusable()
        for index in [i for i, name in enumerate(self._dataset.names) if name in unusable] if unusable else []:
            with suppress(UnusableImage):
                self._dataset.image(index).decode()
                self._dataset.bad_samples.restore(self._dataset.names[index])
