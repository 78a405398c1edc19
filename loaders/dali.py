"""The DALI loader: every file is read and decoded once, and every crop is a region-of-interest resize of that decode.

    plan -> file names and boxes (external source) -> io.file.read -> decoders.image -> C resizes -> stack -> torch

DALI draws nothing; it is told which files and which boxes. Images in a ``.beton`` file need no reading: DALI gets their
bytes. On a GPU decoding is "mixed": nvJPEG and the card's JPEG engines; crops never leave the GPU, and the batches of
several small steps are decoded together. Files whose pixels depend on the decoder (alpha, 16 bits, CMYK and the like,
see :mod:`loaders.decode`) are decoded by the one rule on the host and reach DALI as raw pixels in memory files.
"""

import os
import resource
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from loaders.batch import IMAGENET_MEAN, IMAGENET_STD, Batch
from loaders.dali_graph import build_pipeline, decodes, load_dali
from loaders.dataset import ImageDataset
from loaders.decode import decode
from loaders.delivery import Delivery, Job
from loaders.errors import UserError
from loaders.names import printable
from loaders.order import BatchOrder
from loaders.plan import ViewPlan
from loaders.stored import StoredDataset

_AHEAD = 3  # batches in DALI's own queue
_GPU_BATCH = 512  # images that DALI works on together at least, in several steps' batches if those are smaller
_OPEN_BATCHES = 8  # more than are in all queues together
_LARGEST_HINT = 6500  # pixels a side up to which the hardware decoder's memory is set aside at the start


class _MemoryFile:
    """An image decoded by the one rule, as raw pixels (PPM) in a nameless file. Closed with its last reference."""

    def __init__(self, path: str) -> None:
        image = decode(path)
        try:
            self._handle = os.memfd_create("cocor-image")
        except OSError as fault:
            raise UserError(
                f"{printable(path)}: no file handle for its pixels ({fault.strerror}); "
                "raise the limit (ulimit -n 8192) or lower --batch-size"
            ) from fault
        with os.fdopen(os.dup(self._handle), "wb") as file:
            file.write(b"P6 %d %d 255\n" % image.size)
            file.write(image.tobytes())

    @property
    def path(self) -> str:
        return f"/proc/self/fd/{self._handle}"

    def __del__(self) -> None:
        if hasattr(self, "_handle"):
            os.close(self._handle)


@dataclass(frozen=True)
class _Request:
    """Jobs of one or more steps, DALI's input for each image (a file's name or bytes), memory files to be kept open."""

    jobs: list[Job]
    files: list[np.ndarray]
    memory_files: Sequence[_MemoryFile] = ()


class DaliLoader:
    """Batches of ``dataset`` as ``plan`` and ``order`` say, on ``device``.

    ``workers`` is the number of DALI's threads (default: one a core); ``hw_decoder_load`` the share of the JPEGs that
    go to the GPU's hardware decoder. Raises :class:`UserError` naming the file if one cannot be decoded, and if DALI or
    the GPU is missing.
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
        hw_decoder_load: float = 0.65,
        mean: Sequence[float] = IMAGENET_MEAN,
        std: Sequence[float] = IMAGENET_STD,
    ) -> None:
        load_dali()
        if not dataset.plain.all():
            _allow_open_files(_OPEN_BATCHES * max(order.local_batch_size, _GPU_BATCH))
        self._delivery = Delivery(dataset, plan, order, device, dtype, workers, mean, std)
        self._hw_decoder_load = hw_decoder_load
        # A GPU decodes large batches faster than small ones, and DALI's cost on the host is a batch's, not an image's.
        self._steps_at_once = -(-_GPU_BATCH // order.local_batch_size) if self._delivery.on_gpu else 1
        self._pipeline: Any = None
        self._requests: Iterator[_Request] = iter(())
        self._in_flight: deque[_Request] = deque()

    @property
    def steps_per_epoch(self) -> int:
        return self._delivery.order.steps

    def epoch(self, e: int, start_step: int = 0) -> Generator[Batch, None, None]:
        return self._delivery.deliver(self._pairs(e, start_step), in_background=False)

    def close(self) -> None:
        self._delivery.close()
        self._pipeline = None

    def _requests_of(self, epoch: int, start_step: int) -> Generator[_Request, None, None]:
        dataset = self._delivery.dataset
        with ThreadPoolExecutor(max(1, self._delivery.workers), thread_name_prefix="cocor-decode") as pool:
            jobs = self._delivery.jobs(epoch, start_step)
            while together := list(islice(jobs, self._steps_at_once)):
                index = np.concatenate([job.planned.index for job in together])
                if isinstance(dataset, StoredDataset):
                    yield _Request(together, list(pool.map(dataset.encoded, index.tolist())))
                    continue
                paths = [dataset.paths[i] for i in index]
                awkward = np.flatnonzero(~dataset.plain[index])
                memory_files = list(pool.map(_MemoryFile, [paths[i] for i in awkward]))
                for i, memory_file in zip(awkward, memory_files, strict=True):
                    paths[i] = memory_file.path
                yield _Request(together, [np.frombuffer(os.fsencode(path), np.uint8) for path in paths], memory_files)

    def _pairs(self, epoch: int, start_step: int) -> Generator[tuple[Job, Tensor], None, None]:
        """Jobs and their crops uint8 (B, C, S, S, 3) on the loader's device."""
        with self._delivery.prefetch(self._requests_of(epoch, start_step), depth=_AHEAD + 1) as self._requests:
            try:
                if self._pipeline is None:
                    self._pipeline = self._build()
                while True:
                    crops = self._run()
                    if crops is None:
                        return
                    jobs = self._in_flight.popleft().jobs
                    yield from zip(jobs, crops.split([len(job.planned.index) for job in jobs]), strict=True)
            finally:
                self._drain()

    def _run(self) -> Tensor | None:
        """The crops of the oldest request in flight; None at the epoch's end."""
        stream = torch.cuda.current_stream(self._delivery.device) if self._delivery.on_gpu else None
        try:
            (crops,) = self._pipeline.run(stream)
        except StopIteration:
            return None
        except RuntimeError as fault:
            self._pipeline = None  # it does not survive an error
            raise self._explain(fault) from fault
        return torch.from_dlpack(crops.as_tensor())

    def _drain(self) -> None:
        """Let DALI finish what it has been told to do, so that the pipeline is ready for another epoch."""
        self._requests = iter(())
        try:
            if self._pipeline is not None:
                with suppress(StopIteration):
                    while True:
                        self._pipeline.run()
                self._pipeline.reset()
        except RuntimeError:
            self._pipeline = None
        self._in_flight.clear()

    def _next_inputs(self) -> list[Any]:
        """DALI's external source: files, then begin and end (y, x) of every crop's region."""
        request = next(self._requests)
        self._in_flight.append(request)
        inputs: list[Any] = [request.files]
        boxes = np.concatenate([job.planned.boxes for job in request.jobs]).astype(np.float32)  # (B, C, 4)
        begin, end = boxes[..., :2], boxes[..., :2] + boxes[..., 2:]
        for crop in range(begin.shape[1]):
            inputs += [np.ascontiguousarray(begin[:, crop]), np.ascontiguousarray(end[:, crop])]
        return inputs

    def _build(self) -> Any:
        on_gpu = self._delivery.on_gpu
        return build_pipeline(
            self._next_inputs,
            in_memory=isinstance(self._delivery.dataset, StoredDataset),
            batch_size=self._steps_at_once * self._delivery.order.local_batch_size,
            crops=self._delivery.plan.layout.crops,
            size=self._delivery.plan.size,
            threads=max(1, self._delivery.workers),
            device_id=self._delivery.device.index if on_gpu else None,
            ahead=_AHEAD,
            gpu_decoder=self._gpu_options() if on_gpu else {},
        )

    def _gpu_options(self) -> dict[str, Any]:
        """The hardware decoder's share, and room for the largest image, so that it does not stall later to grow."""
        dataset = self._delivery.dataset
        height, width = np.minimum(dataset.sizes[dataset.plain].max(axis=0, initial=1), _LARGEST_HINT).tolist()
        return {
            "hw_decoder_load": self._hw_decoder_load,
            "preallocate_height_hint": height,
            "preallocate_width_hint": width,
        }

    def _explain(self, fault: RuntimeError) -> Exception:
        """The image on which DALI failed, found by decoding what it was working on. Other faults as they are."""
        dataset = self._delivery.dataset
        jobs = [job for request in self._in_flight for job in request.jobs]
        places = [int(i) for job in jobs for i in job.planned.index]
        for i in places:
            try:
                dataset.image(i).decode() if isinstance(dataset, StoredDataset) else decode(dataset.paths[i])
            except UserError as culprit:
                return culprit
        for i in places:
            if not decodes(_encoded(dataset, i)):
                return UserError(
                    f"{printable(dataset.paths[i])}: DALI cannot decode this file, though Pillow can; "
                    "re-encode it, or choose another --loader"
                )
        return fault


def _encoded(dataset: ImageDataset, index: int) -> np.ndarray:
    if isinstance(dataset, StoredDataset):
        return dataset.encoded(index)
    return np.fromfile(dataset.paths[index], np.uint8)


def _allow_open_files(count: int) -> None:
    """Raise this process's soft limit by ``count`` open files, as far as its hard limit allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + 1024
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
