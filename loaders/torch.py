"""The reference loader: PyTorch's DataLoader and Pillow. Slow, and obviously right.

Worker processes get planned samples, that is a path (or a place in a ``.beton`` file) and its crop boxes. They decode
the image, resize every box with Pillow's antialiased bilinear filter, and send back uint8 crops.
"""

import errno
import shutil
from collections import deque
from collections.abc import Generator, Iterator, Sequence

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from loaders.batch import IMAGENET_MEAN, IMAGENET_STD, Batch
from loaders.dataset import ImageDataset
from loaders.decode import decode
from loaders.delivery import Delivery, Job, paths_of
from loaders.errors import UserError
from loaders.order import BatchOrder
from loaders.plan import ViewPlan
from loaders.stored import StoredDataset, StoredImage

_AHEAD = 2  # batches that each worker prepares
_Sample = tuple[str | StoredImage, np.ndarray]  # path or place in a file, boxes (C, 4)


class TorchLoader:
    """Batches of ``dataset`` as ``plan`` and ``order`` say, on ``device``.

    ``workers`` processes decode (default: one a core; 0 decodes in the background thread). Raises :class:`UserError`
    naming the file if one cannot be decoded.
    """

    def __init__(
        self,
        dataset: ImageDataset,
        plan: ViewPlan,
        *,
        order: BatchOrder,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        workers: int | None = None,
        mean: Sequence[float] = IMAGENET_MEAN,
        std: Sequence[float] = IMAGENET_STD,
    ) -> None:
        self._delivery = Delivery(dataset, plan, order, device, dtype, workers, mean, std)
        self._crops = _Crops(plan.size)
        batch_bytes = order.local_batch_size * plan.layout.crops * plan.size**2 * 3
        self._collate = _Collate(shared=_fits_shared_memory(batch_bytes * (_AHEAD * self._delivery.workers + 2)))

    @property
    def steps_per_epoch(self) -> int:
        return self._delivery.order.steps

    def epoch(self, e: int, start_step: int = 0) -> Generator[Batch, None, None]:
        return self._delivery.deliver(self._pairs(e, start_step))

    def close(self) -> None:
        self._delivery.close()

    def _pairs(self, epoch: int, start_step: int) -> Generator[tuple[Job, Tensor], None, None]:
        pending: deque[Job] = deque()
        workers = self._delivery.workers
        loader = DataLoader(
            self._crops,
            batch_sampler=self._planned_samples(epoch, start_step, pending),
            collate_fn=self._collate,
            num_workers=workers,
            prefetch_factor=_AHEAD if workers else None,
        )
        try:
            for crops in loader:  # in the sampler's order
                if isinstance(crops, UserError):
                    raise crops
                yield pending.popleft(), self._delivery.stage(torch.as_tensor(crops))
        except (RuntimeError, OSError) as fault:
            raise _explain(fault) from fault

    def _planned_samples(self, epoch: int, start_step: int, pending: deque[Job]) -> Iterator[list[_Sample]]:
        for job in self._delivery.jobs(epoch, start_step):
            pending.append(job)
            yield list(zip(_sources(self._delivery.dataset, job), job.planned.boxes, strict=True))


class _Crops(Dataset):
    """Crops uint8 (C, S, S, 3) of a planned sample, or the error that it met: raising would lose the one-line text."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __getitem__(self, sample: _Sample) -> np.ndarray | UserError:
        source, boxes = sample
        try:
            image = source.decode() if isinstance(source, StoredImage) else decode(source)
        except UserError as fault:
            return fault
        return np.stack([resized_crop(image, box, self._size) for box in boxes])


class _Collate:
    """Stack samples; in shared memory if there is room, else through the pipe, which is slower but always works."""

    def __init__(self, shared: bool) -> None:
        self._shared = shared

    def __call__(self, samples: list[np.ndarray | UserError]) -> Tensor | np.ndarray | UserError:
        arrays = []
        for sample in samples:
            if isinstance(sample, UserError):
                return sample
            arrays.append(sample)
        batch = np.stack(arrays)
        return torch.from_numpy(batch) if self._shared else batch


def _sources(dataset: ImageDataset, job: Job) -> Sequence[str | StoredImage]:
    if isinstance(dataset, StoredDataset):
        return [dataset.image(i) for i in job.planned.index]
    return paths_of(dataset, job)


def resized_crop(image: Image.Image, box: np.ndarray, size: int) -> np.ndarray:
    """The box (top, left, height, width) of ``image``, resized to uint8 (size, size, 3): antialiased, bilinear."""
    top, left, height, width = (int(value) for value in box)
    corners = (left, top, left + width, top + height)
    return np.asarray(image.resize((size, size), Image.Resampling.BILINEAR, box=corners))


def _fits_shared_memory(needed: int) -> bool:
    try:
        return shutil.disk_usage("/dev/shm").free > needed
    except OSError:
        return True  # a system without /dev/shm shares memory in another way


def _explain(fault: RuntimeError | OSError) -> Exception:
    if isinstance(fault, OSError) and fault.errno == errno.EMFILE:
        return UserError("too many open files: raise the limit (ulimit -n 4096) or lower --workers")
    if "DataLoader worker" in str(fault) and ("killed" in str(fault) or "exited" in str(fault)):
        return UserError(
            "a data worker was killed, most often for lack of memory or of shared memory (/dev/shm): "
            "lower --workers or --batch-size"
        )
    return fault
