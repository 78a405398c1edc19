"""Base class of the loaders: from planned jobs to batches.

    BatchOrder + ViewPlan -> Job (:mod:`loaders.pipeline.jobs`) -> the loader's crops -> executor: views -> Batch

On the CPU all of it happens in a background thread. On a GPU the background thread prepares jobs (and whatever crops
are made on the host) in pinned memory; the executor is launched by the consumer, on its current stream.
"""

from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from contextlib import closing
from threading import Lock
from typing import TypedDict, TypeVar
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor

from loaders.batch import Batch
from loaders.channels import IMAGENET_MEAN, IMAGENET_STD, luma
from loaders.cpus import available_cores
from loaders.datasets.dataset import ImageDataset, OnError
from loaders.errors import UserError
from loaders.kernels import make_executor
from loaders.pipeline.buffers import BufferPool
from loaders.pipeline.jobs import Job, Jobs
from loaders.pipeline.prefetch import Prefetch
from loaders.views.order import BatchOrder
from loaders.views.plan import ViewPlan

Item = TypeVar("Item")
Work = TypeVar("Work", bound="Prefetch | Generator")
JobCrops = Generator[tuple[Job, Tensor], None, None] | Prefetch[tuple[Job, Tensor]]


class LoaderOptions(TypedDict, total=False):
    """Keywords that all loaders take; see :class:`PipelineLoader`."""

    device: torch.device | str
    dtype: torch.dtype
    workers: int | None
    mean: Sequence[float]
    std: Sequence[float]
    on_error: OnError


class PipelineLoader(ABC):
    """Batches of ``dataset`` as ``plan`` and ``order`` say; subclasses make the crops.

    - ``device``, ``dtype``: where images arrive.
    - ``mean``, ``std``: of the values in [0, 1], by which images are normalised. Three values are those of R, G and B;
      with one value, images have one channel, the luma of the views, which are rendered in colour all the same.
    - ``workers``: threads or processes that decode; None means one per core.
    - ``on_error``: whether an image that turns out unusable while the loader runs stops it with a UserError that names
      it, or is replaced by another sample (:mod:`loaders.pipeline.jobs`).
    """

    views_share = 0.25  # of the workers, for threads that make views: these cost a sixth of decoding and resizing
    crops_in_background = True  # on a GPU; off where making crops is asynchronous itself

    def __init__(
        self, dataset: ImageDataset, plan: ViewPlan, *, order: BatchOrder, device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32, workers: int | None = None, mean: Sequence[float] = IMAGENET_MEAN,
        std: Sequence[float] = IMAGENET_STD, on_error: OnError = "stop"
    ) -> None:  # fmt: skip
        self.dataset, self.plan, self.order, self.dtype = dataset, plan, order, dtype
        self.device = usable_device(device)
        self.workers = available_cores() if workers is None else workers
        threads = max(1, int(self.workers * self.views_share))
        self._grey = len(mean) == 1
        mean, std = ([*values] * (3 // len(values)) for values in (mean, std))  # of R, G and B
        self._executor = make_executor(self.device, dtype, plan.layout, plan.size, mean, std, threads)
        self.jobs = Jobs(dataset, plan, order, on_error, pinned=self.on_gpu)
        self._memory = BufferPool()
        self._active: WeakSet[Prefetch | Generator] = WeakSet()
        self._epoch: object = None  # which epoch is open: a generator that is closed late must not end the next one
        self._lock = Lock()

    @abstractmethod
    def crops(self, epochs: range, start_step: int) -> Generator[tuple[Job, Tensor], None, None]:
        """Yield the jobs of ``epochs`` from ``start_step`` on, with their crops uint8 (B, C, S, S, 3)."""

    @property
    def steps_per_epoch(self) -> int:
        return self.order.steps

    def epoch(self, e: int, start_step: int = 0) -> Generator[Batch, None, None]:
        """Yield the batches of epoch ``e`` from ``start_step`` on, see :meth:`epochs`."""
        return self.epochs(range(e, e + 1), start_step)

    def epochs(self, epochs: range, start_step: int = 0) -> Generator[Batch, None, None]:
        """Yield the batches of several epochs, of the first from ``start_step`` on.

        The first of one are decoded while the last of another are used. Ends what was open before.
        """
        self._end_epoch()
        self._epoch = epoch = object()
        crops = self.crops(epochs, start_step)
        try:
            if not self.on_gpu:
                with self.prefetch(self._finish_all(crops)) as batches:
                    yield from batches
            elif self.crops_in_background:
                yield from self._finish_all(self.prefetch(crops))
            else:
                yield from self._finish_all(self._register(crops))
        finally:
            if self._epoch is epoch:
                self._end_epoch()

    def close(self) -> None:
        """Release threads and memory. Calling it twice is allowed."""
        self._end_epoch()
        self._memory.clear()

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def stage(self, tensor: Tensor) -> Tensor:
        """Put ``tensor`` into memory from which a copy to the device is asynchronous."""
        return tensor.pin_memory() if self.on_gpu else tensor

    def room(self, job: Job) -> Tensor:
        """Allocate memory for a job's crops uint8 (B, C, S, S, 3), pinned for a GPU."""
        shape = (len(job.planned.index), self.plan.layout.crops, self.plan.size, self.plan.size, 3)
        if self.on_gpu:
            return torch.empty(shape, dtype=torch.uint8, device="cpu", pin_memory=True)
        return self._memory.empty(shape, np.uint8)

    def prefetch(self, source: Generator[Item, None, None], depth: int = 2) -> Prefetch[Item]:
        """Run ``source`` in a thread, ``depth`` items ahead, until the epoch ends."""
        return self._register(Prefetch(self._on_device(source), depth))

    def use_device(self) -> None:
        """Make this GPU current in the calling thread: a new one starts on GPU 0."""
        if self.on_gpu:
            torch.cuda.set_device(self.device)

    def finish(self, job: Job, crops: Tensor) -> Batch:
        """Run the programs on crops uint8 (B, C, S, S, 3), on a GPU's current stream."""
        here = {name: tensor.to(self.device, non_blocking=True) for name, tensor in job.tensors.items()}
        crops = crops.to(self.device, non_blocking=True)
        shape = (self.plan.layout.views, len(crops), *crops.shape[2:])
        out = None if self.on_gpu else self._memory.empty(shape, np.float32)
        images = torch.as_tensor(self._executor(crops, here["flips"], here["codes"], here["params"], out))
        return assemble(luma(images) if self._grey else images, here, self.plan, self.dtype)

    def _finish_all(self, source: JobCrops) -> Generator[Batch, None, None]:
        with closing(source):
            for job, crops in source:
                yield self.finish(job, crops)

    def _on_device(self, source: Generator[Item, None, None]) -> Generator[Item, None, None]:
        self.use_device()
        with closing(source):
            yield from source

    def _register(self, work: Work) -> Work:
        with self._lock:
            self._active.add(work)
        return work

    def _end_epoch(self) -> None:
        """End the open epoch and its threads."""
        with self._lock:
            active = list(self._active)
        for work in active:
            work.close()
        self._executor.close()


def assemble(images: Tensor, tensors: dict[str, Tensor], plan: ViewPlan, dtype: torch.dtype) -> Batch:
    """Cut views (T, B, S, S, C) into a batch, uncopied if of the right type."""
    layout, shape = plan.layout, images.shape[2:]
    channels_last = images.to(dtype).permute(0, 1, 4, 2, 3)
    counts = [layout.contrastive, layout.originals, layout.composites, layout.kept]
    views, original, composites, kept = channels_last.split(counts)
    original = original.permute(0, 1, 3, 4, 2).reshape(-1, *shape).permute(0, 3, 1, 2)
    composition, label, index = (tensors[name] for name in ("composition", "label", "index"))
    return Batch(
        views, original, composites, composition, label, index, tensors.get("parameters"), kept if plan.kept else None
    )


def usable_device(device: torch.device | str) -> torch.device:
    """Complete ``device`` by its GPU's number. UserError if there is no such GPU."""
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
