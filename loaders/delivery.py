"""What all loaders share: from the plan to jobs, and from a job's crops to a :class:`Batch`.

    BatchOrder + ViewPlan -> Job (which images, boxes, programs) -> loader: crops -> executor: views -> Batch

On the CPU all of it happens in a background thread. On a GPU the background thread prepares jobs (and whatever crops
are made on the host) in pinned memory; the executor is launched by the consumer, on its current stream.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from threading import Lock
from typing import TypeVar
from weakref import WeakSet

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from loaders.batch import IMAGENET_MEAN, IMAGENET_STD, Batch
from loaders.dataset import ImageDataset, OnError
from loaders.errors import UnusableImage, UserError
from loaders.kernels import make_executor
from loaders.kernels.lower import lower
from loaders.names import available_cores, printable
from loaders.order import MOST_STAND_INS, BatchOrder
from loaders.plan import PlannedBatch, ViewPlan
from loaders.prefetch import Prefetch
from loaders.recycle import Recycler

Item = TypeVar("Item")
Faults = Mapping[int, UserError]  # what is wrong with the samples of a batch, by their places in it


@dataclass(frozen=True)
class Job:
    """A planned batch of B samples as the executor takes it: C crops, T views of up to P ops, L composites.

    ``epoch`` and ``step`` say which batch.
    ``tensors``: flips (B, C) uint8, codes (B, T, P) uint8, params (B, T, P, 8) int32, composition (L, B, 14) uint8,
    label (B,) int64, index (B,) int64.
    """

    epoch: int
    step: int
    planned: PlannedBatch
    tensors: dict[str, Tensor]


class Delivery:
    """Makes jobs and finishes batches for one loader. Arguments as for the loaders.

    ``decoding`` says that the loader keeps ``workers`` threads or processes busy itself: views cost the CPU about a
    sixth of what decoding and resizing cost, so the executor then gets a quarter as many threads.

    ``on_error`` "skip" is about images that turn out unusable while the loader runs. The place of such a sample is
    taken by another one (:meth:`loaders.order.BatchOrder.stand_ins`) with its own image, label, index and views, those
    that the plan draws for it in this epoch. So a batch is a function of the plan and of which images are unusable.
    """

    def __init__(
        self,
        dataset: ImageDataset,
        plan: ViewPlan,
        order: BatchOrder,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        workers: int | None = None,
        mean: Sequence[float] = IMAGENET_MEAN,
        std: Sequence[float] = IMAGENET_STD,
        *,
        on_error: OnError = "stop",
        decoding: bool = True,
    ) -> None:
        if order.length != len(dataset):
            raise ValueError(f"the order covers {order.length} samples, the data set has {len(dataset)}")
        self.dataset, self.plan, self.order, self.dtype = dataset, plan, order, dtype
        self.on_error = on_error
        self.device = usable_device(device)
        self.workers = available_cores() if workers is None else workers
        threads = max(1, self.workers // 4 if decoding else self.workers)
        self._executor = make_executor(self.device, dtype, plan.layout, plan.size, mean, std, threads)
        self._memory = Recycler()
        self._active: WeakSet[Prefetch | Generator] = WeakSet()
        self._lock = Lock()

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def jobs(self, epoch: int, start_step: int) -> Generator[Job, None, None]:
        """The jobs of an epoch from ``start_step`` on, in pinned memory if they go to a GPU."""
        self._try_again()
        for step in range(start_step, self.order.steps):
            yield self._job(epoch, step, *self._samples(epoch, step))

    def renewed(self, job: Job) -> Job:
        """``job`` without the samples that have turned out unusable since it was made."""
        index, passes = self._samples(job.epoch, job.step)
        return job if np.array_equal(index, job.planned.index) else self._job(job.epoch, job.step, index, passes)

    def mend(self, job: Job, faults: Faults, decode: Callable[[Job, list[int]], Faults]) -> Job:
        """``job`` with others in the places where ``faults`` say what is wrong. Raises what cannot be skipped.

        ``decode(job, places)`` makes the crops of these places anew and tells what is wrong now.
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
        """Go on without sample ``index``, whose image cannot be used. Raises ``fault`` if that is not wanted."""
        if self.on_error == "stop":
            raise fault
        self.dataset.incidents.skip(self.dataset.names[index], str(fault))

    def _unusable(self) -> frozenset[str]:
        return self.dataset.incidents.unusable if self.on_error == "skip" else frozenset()

    def _samples(self, epoch: int, step: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The samples of a step and their passes, with stand-ins for unusable ones."""
        index, passes = self.order.indices(epoch, step), self.order.passes(epoch, step)
        unusable = self._unusable()
        if unusable:
            index, passes = index.copy(), passes.copy()
            names = self.dataset.names
            for place in [place for place, i in enumerate(index) if names[i] in unusable]:
                others = self.order.stand_ins(epoch, step, place)
                found = next((other for other in others if names[other[0]] not in unusable), None)
                if found is None:
                    raise UserError(
                        f"{printable(self.dataset.root)}: {printable(names[index[place]])} cannot be used, nor can any "
                        f"of (up to) {MOST_STAND_INS} others in its place; is the disk with the data still there?"
                    )
                index[place], passes[place] = found
        return index, passes

    def _job(self, epoch: int, step: int, index: NDArray[np.int64], passes: NDArray[np.int64]) -> Job:
        planned = self.plan.draw(passes, index, self.dataset.sizes[index])
        arrays = {
            "flips": planned.flips,
            "codes": planned.codes,
            "params": lower(planned.codes, planned.magnitudes, self.plan.size),
            "composition": planned.composition,
            "label": self.dataset.labels[index],
            "index": planned.index.copy(),  # the order is read-only memory
        }
        return Job(epoch, step, planned, {name: self.stage(torch.from_numpy(array)) for name, array in arrays.items()})

    def _try_again(self) -> None:
        """A file that was out of reach for a while comes back with the next epoch."""
        unusable = self._unusable()
        for index in [i for i, name in enumerate(self.dataset.names) if name in unusable] if unusable else []:
            with suppress(UnusableImage):
                self.dataset.image(index).decode()
                self.dataset.incidents.restore(self.dataset.names[index])

    def stage(self, tensor: Tensor) -> Tensor:
        """``tensor`` where a copy to the device can start without waiting."""
        return tensor.pin_memory() if self.on_gpu else tensor

    def room(self, job: Job) -> Tensor:
        """Uninitialised memory for the crops of ``job``, uint8 (B, C, S, S, 3); pinned if they go to a GPU."""
        shape = (len(job.planned.index), self.plan.layout.crops, self.plan.size, self.plan.size, 3)
        if self.on_gpu:
            return torch.empty(shape, dtype=torch.uint8, pin_memory=True)
        return self._memory.empty(shape, np.uint8)

    def prefetch(self, source: Generator[Item, None, None], depth: int = 2) -> Prefetch[Item]:
        """Run ``source`` in a thread that :meth:`close` stops."""
        active = Prefetch(self._on_device(source), depth)
        self._register(active)
        return active

    def use_device(self) -> None:
        """Make this GPU the one that the current thread pins memory for: a new thread's GPU is the first one."""
        if self.on_gpu:
            torch.cuda.set_device(self.device)

    def _on_device(self, source: Generator[Item, None, None]) -> Generator[Item, None, None]:
        self.use_device()
        with closing(source):
            yield from source

    def deliver(
        self, pairs: Generator[tuple[Job, Tensor], None, None], in_background: bool = True
    ) -> Generator[Batch, None, None]:
        """Batches from ``pairs`` of jobs and crops (B, C, S, S, 3) uint8. Ends the epoch that was open before.

        On a GPU ``pairs`` may ask to run in the consumer's thread, since it works asynchronously itself.
        """
        self.end_epoch()
        if not self.on_gpu:
            try:
                with self.prefetch(self._finish_all(pairs)) as batches:
                    yield from batches
            finally:
                self.end_epoch()
        elif in_background:
            with self.prefetch(pairs) as ready:
                for job, crops in ready:
                    yield self.finish(job, crops)
        else:
            self._register(pairs)
            yield from self._finish_all(pairs)

    def _finish_all(self, pairs: Generator[tuple[Job, Tensor], None, None]) -> Generator[Batch, None, None]:
        with closing(pairs):
            for job, crops in pairs:
                yield self.finish(job, crops)

    def finish(self, job: Job, crops: Tensor) -> Batch:
        """Run the programs on ``crops`` (B, C, S, S, 3) uint8, on the current stream if on a GPU."""
        here = {name: tensor.to(self.device, non_blocking=True) for name, tensor in job.tensors.items()}
        crops = crops.to(self.device, non_blocking=True)
        shape = (self.plan.layout.views, len(crops), *crops.shape[2:])
        out = None if self.on_gpu else self._memory.empty(shape, np.float32)
        images = self._executor(crops, here["flips"], here["codes"], here["params"], out)  # (T, B, S, S, 3)
        return assemble(torch.as_tensor(images), here, self.plan, self.dtype)

    def end_epoch(self) -> None:
        """End the open epoch and its threads."""
        with self._lock:
            active = list(self._active)
        for item in active:
            item.close()
        self._executor.close()

    def close(self) -> None:
        """As :meth:`end_epoch`, and give memory back."""
        self.end_epoch()
        self._memory.clear()

    def _register(self, active: Prefetch | Generator) -> None:
        with self._lock:
            self._active.add(active)


def assemble(images: Tensor, tensors: dict[str, Tensor], plan: ViewPlan, dtype: torch.dtype) -> Batch:
    """Cut views (T, B, S, S, 3) into a batch, without copying them if they have the right type."""
    layout, size = plan.layout, plan.size
    channels_last = images.to(dtype).permute(0, 1, 4, 2, 3)
    views, original, composites = channels_last.split([layout.contrastive, layout.originals, layout.composites])
    return Batch(
        views,
        original.permute(0, 1, 3, 4, 2).reshape(-1, size, size, 3).permute(0, 3, 1, 2),
        composites,
        tensors["composition"],
        tensors["label"],
        tensors["index"],
    )


def usable_device(device: torch.device | str) -> torch.device:
    """``device`` with its GPU's number. Raises :class:`UserError` if there is no such GPU."""
    device = torch.device(device)
    if device.type != "cuda":
        return device
    count = torch.cuda.device_count()
    if count == 0:
        raise UserError("a GPU was asked for, but PyTorch finds none: check the driver, or run on the CPU")
    number = torch.cuda.current_device() if device.index is None else device.index
    if number >= count:
        raise UserError(f"GPU {number} was asked for, but there are {count}: lower --gpus")
    return torch.device("cuda", number)
