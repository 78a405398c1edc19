"""Reference loader: PyTorch's DataLoader and Pillow, to be checked by eye.

Worker processes get planned samples, that is a path (or a place in a ``.beton`` file) and its crop boxes. They decode
the image, resize every box with Pillow's antialiased filter, and write the crops to memory that they share with the
parent. Needs a little room in /dev/shm, for semaphores.
"""

import errno
import gc
import mmap
import os
import signal
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from functools import partial
from multiprocessing.context import ForkContext, ForkProcess
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from loaders.datasets.decode import EncodedImage
from loaders.errors import UserError
from loaders.pipeline.jobs import Faults, Job
from loaders.pipeline.loader import PipelineLoader
from loaders.views.plan import Filter

_AHEAD = 2  # batches that each worker prepares
_LEFT_TO_PARENT = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
_Sample = tuple[int, EncodedImage, np.ndarray]  # place in the batch, the image, boxes (C, 4)


class TorchLoader(PipelineLoader):
    """Batches decoded by ``workers`` processes; if 0, by the background thread."""

    def crops(self, epochs: range, start_step: int) -> Generator[tuple[Job, Tensor], None, None]:
        slots = _AHEAD * self.workers + 1  # a task is given out when an earlier one's crops are taken
        shape = (slots, self.order.local_batch_size, self.plan.layout.crops, self.plan.size, self.plan.size, 3)
        shared = torch.frombuffer(mmap.mmap(-1, int(np.prod(shape))), dtype=torch.uint8).view(shape)
        decoder = _Decoder(shared, self.plan.filter)
        pending: deque[tuple[Job, int]] = deque()

        def tasks() -> Iterator[tuple[int, list[_Sample]]]:
            for number, job in enumerate(self.jobs.epochs(epochs, start_step)):
                pending.append((job, number % slots))
                yield number % slots, self._samples(job, range(len(job.planned.index)))

        processes: Any = {"multiprocessing_context": _Fork(), "prefetch_factor": _AHEAD} if self.workers else {}
        loader: Any = DataLoader(decoder, batch_size=None, sampler=tasks(), num_workers=self.workers, **processes)
        try:
            for faults in loader:  # in the order of the tasks
                job, slot = pending.popleft()
                job = self.jobs.mend(job, faults, partial(self._decode, decoder, slot))
                yield job, self.stage(shared[slot, : len(job.planned.index)])
        except (RuntimeError, OSError, EOFError) as fault:
            raise _explain(fault) from fault

    def _samples(self, job: Job, places: Iterable[int]) -> list[_Sample]:
        return [(i, self.dataset.image(int(job.planned.index[i])), job.planned.boxes[i]) for i in places]

    def _decode(self, decoder: "_Decoder", slot: int, job: Job, places: list[int]) -> Faults:
        return decoder[slot, self._samples(job, places)]


class _Decoder(Dataset):
    """Decode tasks (slot, samples) into ``crops``; the items are the faults by place."""

    def __init__(self, crops: Tensor, filter: Filter) -> None:
        self._crops, self._filter = crops.numpy(), filter

    def __getitem__(self, task: tuple[int, list[_Sample]]) -> dict[int, UserError]:
        slot, samples = task
        faults = {}
        for place, source, boxes in samples:
            try:
                image = source.decode()
            except UserError as fault:  # DataLoader would wrap a raised one in a traceback
                faults[place] = fault
                continue
            for crop, box in enumerate(boxes):
                self._crops[slot, place, crop] = resized_crop(image, box, self._crops.shape[-2], self._filter)
        return faults


class _Worker(ForkProcess):
    """Forked, as it shares memory with its parent. Only that may end it."""

    def start(self) -> None:
        # Schedulers and terminals signal whole process groups, but the parent may need the data to finish its step.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _LEFT_TO_PARENT)
        try:
            super().start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self._popen.terminate = self._popen.kill  # type: ignore[attr-defined]  # as SIGTERM is blocked in it

    def run(self) -> None:
        gc.freeze()  # its parent's garbage, such as a DALI pipeline, which would wait for threads that are not here
        super().run()


class _Fork(ForkContext):
    Process = _Worker


def resized_crop(image: Image.Image, box: np.ndarray, size: int, filter: Filter = "bilinear") -> np.ndarray:
    """Resize a box (top, left, height, width) to uint8 (size, size, 3), antialiased."""
    top, left, height, width = (int(value) for value in box)
    corners = (left, top, left + width, top + height)
    return np.asarray(image.resize((size, size), Image.Resampling[filter.upper()], box=corners))


def _explain(fault: RuntimeError | OSError | EOFError) -> Exception:
    if os.strerror(errno.EMFILE) in str(fault):
        return UserError("too many open files: raise the limit (ulimit -n 4096) or lower --workers")
    died = "DataLoader worker" in str(fault) and ("killed" in str(fault) or "exited" in str(fault))
    if died or isinstance(fault, EOFError | ConnectionError):  # also in the middle of a message
        return UserError(
            "a data worker was killed, most often for lack of memory, of processes (ulimit -u) or of open files "
            "(ulimit -n 4096): lower --workers or --batch-size"
        )
    if isinstance(fault, OSError) and fault.errno in (errno.ENOSPC, errno.EROFS, errno.EACCES, errno.ENOENT):
        return UserError(f"data workers need semaphores in /dev/shm: {fault.strerror}; mount it, or free space there")
    return fault
