"""Recovery from DALI errors, which kill the pipeline and say little: find the cause, make again what was in flight.

- Unusable images are found by decoding all in flight with :mod:`loaders.datasets.decode`, and skipped or raised, as
  ``on_error`` says.
- If memory runs out on large images, these and all larger ones are decoded on the host from then on.
- Images that only DALI cannot decode are decoded on the host too.
- Anything else gets one more try, with all images in flight decoded on the host.
"""

import logging
from collections.abc import Sequence
from concurrent.futures import Executor

import numpy as np
import torch

from loaders.dali.inputs import Feed, Request
from loaders.dali.pipeline import load_dali, undecodable
from loaders.datasets.dataset import ImageDataset
from loaders.datasets.stored import StoredDataset
from loaders.errors import UnusableImage, UserError
from loaders.pipeline.loader import PipelineLoader
from loaders.text import printable

LARGE_PIXELS = 4_000_000
"""If memory runs out on images smaller than this, the batch is too large: decoding them on the host would not help."""

_NO_MEMORY = ("bad_alloc", "out of memory", "allocation failed", "can't allocate", "allocator_failure", "errormemory")
_log = logging.getLogger(__name__)


class Recovery:
    """Makes the requests of one loader again after an error."""

    def __init__(self, loader: PipelineLoader, feed: Feed) -> None:
        self._loader, self._feed = loader, feed

    def after(self, fault: Exception, requests: Sequence[Request], pool: Executor) -> list[Request]:
        """The requests for a new pipeline, after ``fault`` in one of ``requests``, which were in flight.

        Raises:
            UserError: an image that cannot be used, if none may be skipped, or too little memory.
            Exception: ``fault`` itself, if no cause is found and all images were decoded on the host already.
        """
        on_host = False
        if runs_out_of_memory(fault):
            self._move_largest_to_host(requests)
        elif not self._skip_unusable(requests, pool) and not self._move_undecodable_to_host(requests):
            if all(request.on_host for request in requests):
                raise fault
            _log.warning(f"DALI failed ({reason(fault)}); the images it was working on are decoded on the CPU")
            on_host = True
        return [self._feed.request(request.jobs, pool, on_host) for request in requests]

    def _decoded_by_dali(self, requests: Sequence[Request]) -> np.ndarray:
        """The images in ``requests`` that DALI was to decode, each once, in the order in which they are needed."""
        at_dali = [request.index for request in requests if not request.on_host]
        index = np.concatenate([np.empty(0, np.int64), *at_dali])
        _, first = np.unique(index, return_index=True)
        index = index[np.sort(first)]
        return index[~self._feed.on_host[index]]

    def _skip_unusable(self, requests: Sequence[Request], pool: Executor) -> bool:
        """Skip (or raise) the images that Pillow cannot decode either; whether there were any."""

        def fault_of(index: int) -> UnusableImage | None:
            try:
                self._loader.dataset.image(index).decode()
            except UnusableImage as fault:
                return fault
            return None

        found = False
        index = self._decoded_by_dali(requests).tolist()
        for i, fault in zip(index, pool.map(fault_of, index), strict=True):
            if fault is not None:
                self._loader.jobs.skip(i, fault)
                found = True
        return found

    def _move_undecodable_to_host(self, requests: Sequence[Request]) -> bool:
        """Move images that DALI's CPU decoder refuses, or gives another size, to the host; whether there were any."""
        dataset, index = self._loader.dataset, self._decoded_by_dali(requests)
        files = (_encoded(dataset, i) for i in index.tolist())
        found = index[undecodable(files, dataset.sizes[index])]
        self._feed.on_host[found] = True
        for name in dataset.bad_samples.unreported("undecodable", [dataset.names[i] for i in found]):
            _log.warning(f"{printable(name)}: DALI cannot decode it; decoded by Pillow from now on")
        return bool(len(found))

    def _move_largest_to_host(self, requests: Sequence[Request]) -> None:
        """After memory has run out: move the largest image in flight, and all as large, to the host. UserError if it is
        too small to be the cause."""
        index, pixels, dataset = self._decoded_by_dali(requests), self._feed.pixels, self._loader.dataset
        everything = np.concatenate([request.index for request in requests])
        largest = int(everything[pixels[everything].argmax()]) if not len(index) else int(index[pixels[index].argmax()])
        height, width = dataset.sizes[largest].tolist()
        what = f"{printable(dataset.names[largest])} ({width} x {height} pixels)"
        where = "the GPU" if self._loader.on_gpu else "this machine"
        if not len(index) or pixels[largest] < LARGE_PIXELS:
            raise UserError(
                f"DALI ran out of memory on {where}; the largest image that it was working on is {what}: "
                "shrink the images (cocor-prep convert --shorter-side 256) or lower --batch-size"
            )
        _log.warning(f"DALI ran out of memory on {where}; {what} and larger images are decoded on the CPU from now on")
        self._feed.on_host |= pixels >= pixels[largest]
        if self._loader.on_gpu:
            torch.cuda.empty_cache()
            load_dali().backend.ReleaseUnusedMemory()


def runs_out_of_memory(fault: Exception) -> bool:
    """Whether ``fault``, raised by DALI, is about memory: it has no type for that."""
    return isinstance(fault, MemoryError) or any(text in reason(fault).lower() for text in _NO_MEMORY)


def reason(fault: Exception) -> str:
    """What DALI says behind "encountered:", in one line."""
    text = str(fault).rpartition("encountered:")[2].strip()
    return next(iter(text.splitlines()), "") or type(fault).__name__


def _encoded(dataset: ImageDataset, index: int) -> np.ndarray:
    if isinstance(dataset, StoredDataset):
        return dataset.encoded(index)
    try:
        return np.fromfile(dataset.paths[index], np.uint8)
    except OSError:  # gone since Pillow decoded it; the next attempt will find that
        return np.empty(0, np.uint8)
