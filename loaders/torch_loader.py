"""The reference loader: PyTorch's DataLoader and Pillow. Slow, but simple enough to be checked by eye.

Worker processes get planned samples, that is a path (or a place in a ``.beton`` file) and its crop boxes. They decode
the image, resize every box with Pillow's antialiased filter, and send back uint8 crops, or the fault they met.
"""

import errno
import gc
import logging
import multiprocessing
import os
import resource
import shutil
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from functools import partial
from threading import Lock
from typing import Unpack

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from loaders.batch import Batch
from loaders.data_worker import Reading, begin, shares, starting
from loaders.datasets.dataset import ImageDataset
from loaders.datasets.decode import EncodedImage
from loaders.errors import UserError
from loaders.pipeline.delivery import Delivery, DeliveryOptions
from loaders.pipeline.jobs import Faults, Job
from loaders.views.order import BatchOrder
from loaders.views.plan import Filter, ViewPlan

_AHEAD = 2  # batches that each worker prepares
_FEW_FILES = 256
_NO_SEMAPHORES = (errno.ENOSPC, errno.EROFS, errno.EACCES, errno.ENOENT, errno.ENOSYS)  # /dev/shm is full, or missing
_forking = Lock()  # gc.freeze is process-wide: another thread must not unfreeze in between
_Sample = tuple[int, EncodedImage, np.ndarray]  # place in the data set, the image, boxes (C, 4)
_Collated = tuple[Tensor | np.ndarray, dict[int, UserError]]  # crops uint8 (B, C, S, S, 3), faults by place
_log = logging.getLogger(__name__)


class TorchLoader:
    """Batches of ``dataset`` as ``plan`` and ``order`` say, on ``device``.

    ``workers`` processes decode; with 0, or where processes cannot share semaphores, the background thread does. Other
    ``options``: :class:`DeliveryOptions`.
    """

    def __init__(
        self, dataset: ImageDataset, plan: ViewPlan, *, order: BatchOrder, **options: Unpack[DeliveryOptions]
    ) -> None:
        self._delivery = Delivery(dataset, plan, order, **options)
        self._delivery.by_workers = reading = Reading(self._delivery.workers)
        self._crops = _Crops(plan.size, plan.filter, reading)
        batch_bytes = order.local_batch_size * plan.layout.crops * plan.size**2 * 3
        self._collate = _Collate(
            (plan.layout.crops, plan.size, plan.size, 3),
            shared=_fits_shared_memory(batch_bytes * (_AHEAD * self._delivery.workers + 2)),
        )

    @property
    def steps_per_epoch(self) -> int:
        return self._delivery.order.steps

    def epoch(self, e: int, start_step: int = 0) -> Generator[Batch, None, None]:
        return self._delivery.deliver(self._pairs(e, start_step))

    def reading(self) -> list[str]:
        return self._delivery.reading()

    def close(self) -> None:
        self._delivery.close()

    def _pairs(self, epoch: int, start_step: int) -> Generator[tuple[Job, Tensor], None, None]:
        pending: deque[Job] = deque()
        samples = self._planned_samples(epoch, start_step, pending)
        try:
            for collated, faults in self._begun(samples):  # in the sampler's order
                crops = torch.as_tensor(collated)
                job = self._delivery.jobs.mend(pending.popleft(), faults, partial(self._decode, crops))
                yield job, self._delivery.stage(crops)
        except (RuntimeError, OSError, EOFError) as fault:
            raise _explain(fault) from fault

    def _begun(self, samples: Iterator[list[_Sample]]) -> Iterator[_Collated]:
        """Batches of ``samples``, from workers that have started."""
        try:
            _try_queues(self._delivery.workers)
        except OSError as error:
            if error.errno not in _NO_SEMAPHORES:
                raise
            if self._delivery.dataset.incidents.untold("no semaphores", [""]):
                _log.warning(
                    f"data workers need semaphores in /dev/shm: {error.strerror}; this process decodes alone, more "
                    "slowly: free some space there, or mount it"
                )
            return iter(self._loader(samples, workers=0))
        return _start_workers(self._loader(samples, self._delivery.workers))

    def _loader(self, samples: Iterator[list[_Sample]], workers: int) -> DataLoader:
        return DataLoader(
            self._crops,
            batch_sampler=samples,
            collate_fn=self._collate,
            num_workers=workers,
            # Whatever the program's default (forkserver from Python 3.14 on): only forked workers share memory with
            # Reading, and only they start in milliseconds.
            multiprocessing_context="fork" if workers else None,
            worker_init_fn=begin,
            prefetch_factor=_AHEAD if workers else None,
        )

    def _planned_samples(self, epoch: int, start_step: int, pending: deque[Job]) -> Iterator[list[_Sample]]:
        for job in self._delivery.jobs.epoch(epoch, start_step):
            pending.append(job)
            yield self._samples(job, range(len(job.planned.index)))

    def _samples(self, job: Job, places: Iterable[int]) -> list[_Sample]:
        dataset, planned = self._delivery.dataset, job.planned
        indices = ((place, int(planned.index[place])) for place in places)
        return [(index, dataset.image(index), planned.boxes[place]) for place, index in indices]

    def _decode(self, crops: Tensor, job: Job, places: list[int]) -> Faults:
        """Make the crops of some places of the batch in this process, as workers do."""
        found = dict(zip(places, map(self._crops.__getitem__, self._samples(job, places)), strict=True))
        for place, item in found.items():
            if isinstance(item, np.ndarray):
                crops[place] = torch.from_numpy(item)
        return {place: item for place, item in found.items() if isinstance(item, UserError)}


def _try_queues(workers: int) -> None:
    """Make the queues and the event that a DataLoader needs, and let them go. OSError if that is not possible, upon
    which a DataLoader would print a traceback as well."""
    context = multiprocessing.get_context("fork")
    if workers:
        _ = context.Event(), [context.Queue() for _ in range(workers + 1)]


def _start_workers(loader: DataLoader) -> Iterator[_Collated]:
    """``iter(loader)``, with forked workers that never collect their parent's garbage: destroying a dead DALI pipeline,
    for one, would wait for threads that do not exist in the worker."""
    with _forking, starting():
        gc.freeze()
        try:
            return iter(loader)
        finally:
            gc.unfreeze()  # here, not in them


class _Crops(Dataset):
    """Crops uint8 (C, S, S, 3) of a planned sample, or its error: DataLoader would wrap a raised one in a traceback."""

    def __init__(self, size: int, filter: Filter, reading: Reading) -> None:
        self._size, self._filter, self._reading = size, filter, reading

    def __getitem__(self, sample: _Sample) -> np.ndarray | UserError:
        index, source, boxes = sample
        try:
            with self._reading.image(index):
                image = source.decode()
        except UserError as fault:
            return fault
        return np.stack([resized_crop(image, box, self._size, self._filter) for box in boxes])


class _Collate:
    """Stacks samples, in shared memory if there is room; else they go through a pipe, slower but always possible."""

    def __init__(self, shape: tuple[int, ...], shared: bool) -> None:
        self._shape, self._shared = shape, shared

    def __call__(self, samples: list[np.ndarray | UserError]) -> _Collated:
        batch = np.empty((len(samples), *self._shape), np.uint8)
        faults = {}
        for place, sample in enumerate(samples):
            if isinstance(sample, UserError):
                faults[place] = sample
            else:
                batch[place] = sample
        return (torch.from_numpy(batch) if self._shared and shares() else batch), faults


def resized_crop(image: Image.Image, box: np.ndarray, size: int, filter: Filter = "bilinear") -> np.ndarray:
    """The box (top, left, height, width) of ``image``, resized to uint8 (size, size, 3), antialiased."""
    top, left, height, width = (int(value) for value in box)
    corners = (left, top, left + width, top + height)
    return np.asarray(image.resize((size, size), Image.Resampling[filter.upper()], box=corners))


def _fits_shared_memory(needed: int) -> bool:
    try:
        return shutil.disk_usage("/dev/shm").free > needed
    except OSError:
        return True  # a system without /dev/shm shares memory in another way


def _explain(fault: RuntimeError | OSError | EOFError) -> Exception:
    if os.strerror(errno.EMFILE) in str(fault) or "items of ancdata" in str(fault):  # the latter: they were dropped
        return UserError("too many open files: raise the limit (ulimit -n 4096) or lower --workers")
    died = "DataLoader worker" in str(fault) and ("killed" in str(fault) or "exited" in str(fault))
    if died or isinstance(fault, EOFError | ConnectionError):  # also in the middle of a message
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if files < _FEW_FILES:
            return UserError(f"a data worker died, most likely at the limit of {files} open files: ulimit -n 4096")
        return UserError(
            "a data worker was killed, most often for lack of memory, of shared memory (/dev/shm) or of processes "
            "(ulimit -u): lower --workers or --batch-size"
        )
    return fault
