"""Inputs of DALI: for each image its file's name, or its bytes, and its boxes.

Some images are decoded on the host by :mod:`loaders.datasets.decode` and cropped there. DALI gets their crops side by
side as raw pixels (PPM), in a memory file where it expects a name, and passes them on unchanged:

- those whose pixels depend on the decoder: alpha, 16 bits, CMYK and the like;
- huge ones, one after the other, so that memory stays bounded on the host and on the GPU;
- those that DALI has failed to decode (:mod:`loaders.dali.recovery`);
- those whose files have another length than when the data set was opened, or are no files any more. DALI crops an image
  of another size as if it were the old one, waits for ever at a named pipe, and on a GPU takes half a JPEG for a whole.
"""

import logging
import os
import stat
from collections.abc import Sequence
from concurrent.futures import Executor
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import chain
from threading import Lock

import numpy as np
from numpy.typing import NDArray

from loaders.datasets.stored import StoredDataset
from loaders.errors import UnusableImage, UserError
from loaders.pipeline.jobs import Job
from loaders.pipeline.loader import PipelineLoader
from loaders.text import printable
from loaders.torch_loader import resized_crop

HOST_PIXELS = 50_000_000
"""A larger image is decoded on the host, GPU or not: the GPU's decoder would need hundreds of megabytes for it."""

_SHOWN = 5  # names in a message
_CHANGED = "changed since the data set was opened, so decoded by Pillow from now on"
_log = logging.getLogger(__name__)
_one_decode = Lock()


class MemoryFile:
    """``content`` in an anonymous file, closed with its last reference."""

    def __init__(self, content: NDArray[np.uint8], name: str) -> None:
        try:
            self._handle = os.memfd_create("cocor-image")
        except OSError as fault:
            raise UserError(
                f"{printable(name)}: no file handle for its pixels ({fault.strerror}); "
                "raise the limit (ulimit -n 8192) or lower --batch-size"
            ) from fault
        with open(self._handle, "wb", closefd=False) as file:
            file.write(content.data)

    @property
    def path(self) -> str:
        return f"/proc/self/fd/{self._handle}"

    def __del__(self) -> None:
        if hasattr(self, "_handle"):
            os.close(self._handle)


@dataclass(frozen=True)
class Request:
    """Jobs of one or more steps, N images: names or bytes uint8, boxes float32 (N, C, 4) top, left, height, width.

    ``sizes`` int32 (N, 2): the height and width that DALI must find in each of ``files``.
    ``on_host``: all of them were decoded on the host. ``kept`` must stay alive until DALI has read it.
    """

    jobs: list[Job]
    files: list[np.ndarray]
    boxes: NDArray[np.float32]
    sizes: NDArray[np.int32]
    on_host: bool
    kept: Sequence[MemoryFile]

    @property
    def index(self) -> NDArray[np.int64]:
        return np.concatenate([job.planned.index for job in self.jobs])


class Feed:
    """Make requests of jobs; ``on_host`` bool (N,) are the images that DALI must not decode."""

    def __init__(self, loader: PipelineLoader) -> None:
        self._loader = loader
        dataset = loader.dataset
        self.pixels = dataset.sizes.astype(np.int64).prod(axis=1)
        huge = self.pixels > HOST_PIXELS
        self.on_host: NDArray[np.bool_] = ~dataset.plain | huge
        self._report(logging.INFO, f"decoded on the CPU, for more than {HOST_PIXELS:,} pixels", np.flatnonzero(huge))

    def request(self, jobs: list[Job], pool: Executor, on_host: bool = False) -> Request:
        """Make a request for ``jobs`` in the threads of ``pool``, decoding all images ``on_host`` or as few as need be.

        Unusable images are skipped or raised, as the loader's ``on_error`` says.
        """
        dataset, size = self._loader.dataset, self._loader.plan.size
        stored = isinstance(dataset, StoredDataset)
        while True:
            jobs = [self._loader.jobs.renewed(job) for job in jobs]
            index = np.concatenate([job.planned.index for job in jobs])
            boxes = np.concatenate([job.planned.boxes for job in jobs])
            changed = index[self._changed(index, pool)]
            self.on_host[changed] = True
            host = np.full(len(index), on_host) | self.on_host[index]
            places = np.arange(len(index)) if stored else np.flatnonzero(host)
            found = dict(
                zip(places.tolist(), pool.map(self._content, index[places], boxes[places], host[places]), strict=True)
            )
            faults = {place: item for place, item in found.items() if isinstance(item, UnusableImage)}
            if not faults:
                break
            for place, fault in faults.items():
                self._loader.jobs.skip(int(index[place]), fault)
        self._report(logging.WARNING, _CHANGED, changed)
        contents = {place: item for place, item in found.items() if not isinstance(item, UnusableImage)}
        boxes = boxes.astype(np.float32)
        boxes[host] = [(0, c * size, size, size) for c in range(boxes.shape[1])]
        sizes = dataset.sizes[index]
        sizes[host] = size, boxes.shape[1] * size
        if stored:
            return Request(jobs, list(contents.values()), boxes, sizes, on_host, ())
        kept = {place: MemoryFile(content, dataset.names[index[place]]) for place, content in contents.items()}
        paths = [kept[place].path if place in kept else dataset.paths[i] for place, i in enumerate(index)]
        files = [np.frombuffer(os.fsencode(path), np.uint8) for path in paths]
        return Request(jobs, files, boxes, sizes, on_host, list(kept.values()))

    def renewed(self, request: Request, pool: Executor) -> Request:
        """Renew ``request`` without images that have turned out unusable meanwhile."""
        jobs = [self._loader.jobs.renewed(job) for job in request.jobs]
        same = all(new is old for new, old in zip(jobs, request.jobs, strict=True))
        return request if same else self.request(jobs, pool, request.on_host)

    def _content(self, index: int, boxes: NDArray[np.int32], host: bool) -> NDArray[np.uint8] | UnusableImage:
        """Make an image file for DALI: the stored bytes, or a PPM of the crops side by side."""
        dataset, plan = self._loader.dataset, self._loader.plan
        try:
            if isinstance(dataset, StoredDataset) and not host:
                return dataset.encoded(int(index))
            with _one_decode if self.pixels[index] > HOST_PIXELS else nullcontext():
                image = dataset.image(int(index)).decode()
                crops = np.concatenate([resized_crop(image, box, plan.size, plan.filter) for box in boxes], axis=1)
        except UnusableImage as fault:
            return fault
        return np.frombuffer(b"P6 %d %d 255\n" % (crops.shape[1], plan.size) + crops.tobytes(), np.uint8)

    def _changed(self, index: NDArray[np.int64], pool: Executor) -> NDArray[np.bool_]:
        """Find files that have another length than at the opening, or are no files any more."""
        expected = self._loader.dataset.file_sizes
        if expected is None:
            return np.zeros(len(index), np.bool_)
        paths = self._loader.dataset.paths
        lengths = pool.map(
            lambda part: [_length(paths[i]) for i in part], np.array_split(index, max(1, self._loader.workers))
        )
        return np.fromiter(chain.from_iterable(lengths), np.int64, len(index)) != expected[index]

    def _report(self, level: int, topic: str, index: NDArray[np.int64]) -> None:
        """Log ``topic`` with the names of the images ``index``, each once."""
        dataset = self._loader.dataset
        new = dataset.bad_samples.unreported(topic, [dataset.names[i] for i in index])
        if new:
            more = f" and {len(new) - _SHOWN:,} more" if len(new) > _SHOWN else ""
            _log.log(level, f"{topic}: {', '.join(map(printable, new[:_SHOWN]))}{more}")


def _length(path: str) -> int:
    """Return the bytes of a file; -1 if there is none, or it is no regular file."""
    try:
        status = os.stat(path)  # noqa: PTH116 (making a Path takes as long as the call)
    except OSError:
        return -1
    return status.st_size if stat.S_ISREG(status.st_mode) else -1
