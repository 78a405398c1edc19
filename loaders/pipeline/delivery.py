"""What all loaders share: making jobs from the plan, and turning a job's crops into a :class:`Batch`.

    Jobs -> Job (which images, boxes, programs) -> loader: crops -> executor: views -> Batch

On the CPU all of it happens in a background thread. On a GPU the background thread prepares jobs (and whatever crops
are made on the host) in pinned memory; the executor is launched by the consumer, on its current stream.
"""

import logging
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, suppress
from pathlib import Path
from threading import Lock
from typing import Protocol, TypedDict, TypeVar
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor

from loaders.batch import IMAGENET_MEAN, IMAGENET_STD, Batch
from loaders.cpus import available_cores
from loaders.data_worker import Reading
from loaders.datasets.dataset import ImageDataset, OnError
from loaders.errors import UserError
from loaders.kernels import make_executor
from loaders.pipeline import prefetch
from loaders.pipeline.buffers import Recycler
from loaders.pipeline.jobs import Job, Jobs
from loaders.pipeline.prefetch import InConsumer, Prefetch
from loaders.text import printable
from loaders.views.order import BatchOrder
from loaders.views.plan import ViewPlan

Item = TypeVar("Item")

_SHOWN = 3  # files named in a message
_log = logging.getLogger(__name__)


class Pairs(Protocol):
    """An iterator of jobs and their crops (B, C, S, S, 3) uint8 that can be closed early."""

    def __iter__(self) -> Iterator[tuple[Job, Tensor]]: ...

    def close(self) -> None: ...


class DeliveryOptions(TypedDict, total=False):
    """Keywords that all loaders take; see :class:`Delivery`."""

    device: torch.device | str
    dtype: torch.dtype
    workers: int | None
    mean: Sequence[float]
    std: Sequence[float]
    on_error: OnError


class Delivery:
    """Makes jobs (``jobs``) and finishes batches for one loader.

    Images arrive on ``device`` in ``dtype``, normalised by ``mean`` and ``std`` of the values in [0, 1]. ``workers``:
    threads or processes that decode; None means one per core. ``on_error``: whether an image that turns out unusable
    while the loader runs stops it with a UserError that names it, or is replaced by another sample
    (:mod:`loaders.pipeline.jobs`).

    ``decoding``: the loader keeps ``workers`` busy itself. Views cost the CPU about a sixth of what decoding and
    resizing cost, so the executor then gets a quarter as many threads. ``by_workers``: for loaders with worker
    processes, which image each of them is reading.
    """

    by_workers: Reading | None = None

    def __init__(
        self,
        dataset: ImageDataset,
        plan: ViewPlan,
        order: BatchOrder,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        workers: int | None = None,
        mean: Sequence[float] = IMAGENET_MEAN,
        std: Sequence[float] = IMAGENET_STD,
        on_error: OnError = "stop",
        decoding: bool = True,
    ) -> None:
        self.dataset, self.plan, self.order, self.dtype = dataset, plan, order, dtype
        self.device = usable_device(device)
        self.workers = available_cores() if workers is None else workers
        threads = max(1, self.workers // 4 if decoding else self.workers)
        self._executor = make_executor(self.device, dtype, plan.layout, plan.size, mean, std, threads)
        self.jobs = Jobs(dataset, plan, order, on_error, pinned=self.on_gpu)
        self._memory = Recycler()
        self._active: WeakSet[Prefetch | InConsumer] = WeakSet()
        self._epoch: object = None  # which epoch is open: a generator that is closed late must not end the next one
        self._lock = Lock()

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def stage(self, tensor: Tensor) -> Tensor:
        """``tensor`` in memory from which a copy to the device is asynchronous."""
        return tensor.pin_memory() if self.on_gpu else tensor

    def room(self, job: Job) -> Tensor:
        """Uninitialised memory for the crops of ``job``, uint8 (B, C, S, S, 3); pinned if they go to a GPU."""
        shape = (len(job.planned.index), self.plan.layout.crops, self.plan.size, self.plan.size, 3)
        if self.on_gpu:
            return torch.empty(shape, dtype=torch.uint8, device="cpu", pin_memory=True)
        return self._memory.empty(shape, np.uint8)

    def prefetch(self, source: Generator[Item, None, None], depth: int = 2) -> Prefetch[Item]:
        """Run ``source`` in a thread of its own, which :meth:`end_epoch` stops, ``depth`` items ahead."""
        active = Prefetch(self._on_device(source), depth, self._given_up)
        self._register(active)
        return active

    def use_device(self) -> None:
        """Make this GPU current in the calling thread, which may pin memory: a new thread starts on GPU 0."""
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

        ``in_background`` off: on a GPU, iterate ``pairs`` in the consumer's thread, as it is asynchronous itself.
        """
        self.end_epoch()
        self._epoch = epoch = object()
        if not self.on_gpu:
            try:
                with self.prefetch(self._finish_all(pairs)) as batches:
                    yield from batches
            finally:
                if self._epoch is epoch:
                    self.end_epoch()
        elif in_background:
            with self.prefetch(pairs) as ready:
                for job, crops in ready:
                    yield self.finish(job, crops)
        else:
            direct = InConsumer(pairs, self.use_device, self._given_up)
            self._register(direct)
            yield from self._finish_all(direct)

    def _finish_all(self, pairs: Pairs) -> Generator[Batch, None, None]:
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
        """End the open epoch and its threads, except any that are stuck in a read."""
        with self._lock:
            active = list(self._active)
        for item in active:
            item.close()
        self._executor.close()

    def close(self) -> None:
        """As :meth:`end_epoch`, and give memory back."""
        self.end_epoch()
        self._memory.clear()

    def reading(self) -> list[str]:
        """The files that workers are reading, or else those of the data set that this process has open (on Linux)."""
        if self.by_workers is not None:
            return [str(self.dataset.root / self.dataset.names[index]) for index in self.by_workers.now()]
        found, root = [], self.dataset.root.absolute()
        with suppress(OSError):
            for handle in Path("/proc/self/fd").iterdir():
                with suppress(OSError):  # closed meanwhile
                    path = handle.readlink()
                    if path.is_relative_to(root):
                        found.append(str(path))
        return sorted(set(found))

    def _given_up(self) -> None:
        """Log, once for each file, that a thread was left behind because the disk does not answer."""
        names = self.reading()
        if self.dataset.incidents.untold("does not answer", names or [""]):
            more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            shown = ", ".join(map(printable, names[:_SHOWN])) or printable(self.dataset.root)
            _log.warning(
                f"the disk with the data does not answer: gave up after {prefetch.PATIENCE:.0f} s, "
                f"while reading {shown}{more}"
            )

    def _register(self, active: Prefetch | InConsumer) -> None:
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
