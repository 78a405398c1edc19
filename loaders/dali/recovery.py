"""Recovery from DALI errors, which kill the pipeline and say little.

Images that Pillow cannot decode either are skipped or raised, as ``on_error`` says. Those that only DALI cannot decode
are decoded on the host from then on; so are the largest ones if memory runs out. Anything else gets one more try, with
all images in flight decoded on the host.
"""

import logging
from collections.abc import Sequence
from concurrent.futures import Executor

import numpy as np
import torch

from loaders.dali.inputs import Feed, Request
from loaders.dali.pipeline import load_dali, undecodable
from loaders.datasets.dataset import ImageDataset
from loaders.errors import UnusableImage, UserError
from loaders.pipeline.loader import PipelineLoader
from loaders.text import printable

_LARGE_PIXELS = 4_000_000  # where smaller images exhaust the memory, decoding them on the host would not help
_NO_MEMORY = ("bad_alloc", "out of memory", "allocation failed", "can't allocate", "allocator_failure", "errormemory")
_log = logging.getLogger(__name__)


def recover(
    loader: PipelineLoader, feed: Feed, fault: Exception, requests: Sequence[Request], pool: Executor
) -> list[Request]:
    """Make the ``requests`` in flight at ``fault`` again, for a new pipeline.

    Raises:
        UserError: an image that cannot be used, if none may be skipped, or too little memory.
        Exception: ``fault`` itself, if no cause is found and all images were decoded on the host already.
    """
    said = str(fault).rpartition("encountered:")[2].strip()
    reason = next(iter(said.splitlines()), "") or type(fault).__name__
    flying = [i for request in requests if not request.on_host for i in request.index.tolist() if not feed.on_host[i]]
    index, on_host = list(dict.fromkeys(flying)), False  # of the images that DALI decoded, in the order of need
    if isinstance(fault, MemoryError) or any(text in reason.lower() for text in _NO_MEMORY):
        _move_largest(loader, feed, index, np.concatenate([request.index for request in requests]))
    elif not _skip_unusable(loader, index, pool) and not _move_undecodable(loader.dataset, feed, index):
        if all(request.on_host for request in requests):
            raise fault
        _log.warning(f"DALI failed ({reason}); the images it was working on are decoded on the CPU")
        on_host = True
    return [feed.request(request.jobs, pool, on_host) for request in requests]


def _skip_unusable(loader: PipelineLoader, index: list[int], pool: Executor) -> bool:
    """Skip (or raise) images that Pillow cannot decode either; False if there are none."""

    def fault_of(i: int) -> UnusableImage | None:
        try:
            loader.dataset.image(i).decode()
        except UnusableImage as fault:
            return fault
        return None

    faults = {i: fault for i, fault in zip(index, pool.map(fault_of, index), strict=True) if fault is not None}
    for i, fault in faults.items():
        loader.jobs.skip(i, fault)
    return bool(faults)


def _move_undecodable(dataset: ImageDataset, feed: Feed, index: list[int]) -> bool:
    """Move images that DALI's CPU decoder refuses to the host; False if none."""
    found = [index[place] for place in undecodable(map(feed.encoded, index), dataset.sizes[index])]
    feed.on_host[found] = True
    for name in dataset.bad_samples.unreported("undecodable", [dataset.names[i] for i in found]):
        _log.warning(f"{printable(name)}: DALI cannot decode it; decoded by Pillow from now on")
    return bool(found)


def _move_largest(loader: PipelineLoader, feed: Feed, index: list[int], everything: np.ndarray) -> None:
    """Move the largest image, and all as large, to the host. UserError if it is too small."""
    largest = max(index or everything.tolist(), key=lambda i: int(feed.pixels[i]))
    height, width = loader.dataset.sizes[largest].tolist()
    what = f"{printable(loader.dataset.names[largest])} ({width} x {height} pixels)"
    where = "the GPU" if loader.on_gpu else "this machine"
    if not index or feed.pixels[largest] < _LARGE_PIXELS:
        raise UserError(
            f"DALI ran out of memory on {where}; the largest image that it was working on is {what}: "
            "shrink the images (cocor-prep convert --shorter-side 256) or lower --batch-size"
        )
    _log.warning(f"DALI ran out of memory on {where}; {what} and larger images are decoded on the CPU from now on")
    feed.on_host |= feed.pixels >= feed.pixels[largest]
    if loader.on_gpu:
        torch.cuda.empty_cache()
        load_dali().backend.ReleaseUnusedMemory()
