"""Decoding by DALI: requests go into a pipeline, crops come out in the same order.

    requests -> files' bytes and boxes (external source) -> slice -> decoders.image -> C resizes -> stack -> torch

A pipeline is kept from one epoch to the next. An error kills it: a new one is built, and the requests in flight are
made again without what caused the error (:mod:`loaders.dali.recovery`).
"""

from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor

from loaders.dali.inputs import Feed, Pending, Request
from loaders.dali.pipeline import build_pipeline, shared
from loaders.dali.recovery import recover
from loaders.kernels.resize import resize_crops
from loaders.pipeline.jobs import Job
from loaders.pipeline.loader import PipelineLoader

GPU_BATCH = 512
"""The fewest images that DALI decodes together on a GPU; smaller batches are joined to reach it."""

_AHEAD = 3  # batches in DALI's own queue
_READ_AHEAD = 2  # requests whose files are being read
_LARGEST_HINT = 6500  # pixels a side up to which the hardware decoder's memory is set aside at the start


class DaliDecoder:
    """Decoder of the jobs of ``loader``, one epoch at a time.

    ``hw_decoder_load`` and ``read_at_once``: see :class:`loaders.dali.loader.DaliLoader`.
    """

    def __init__(self, loader: PipelineLoader, feed: Feed, hw_decoder_load: float, read_at_once: int) -> None:
        self._loader, self._feed, self._hw_decoder_load = loader, feed, hw_decoder_load
        self._read_at_once = read_at_once
        self._crops_by_dali = loader.on_gpu or loader.plan.filter != "bilinear"
        # A GPU decodes large batches faster than small ones, and DALI costs the host the same for either.
        self._steps_at_once = -(-GPU_BATCH // loader.order.local_batch_size) if loader.on_gpu else 1
        self._pipeline: Any = None
        self._pool: ThreadPoolExecutor  # of the open epoch
        self._requests: Iterator[Request] = iter(())
        self._again: deque[Request] = deque()  # to be made again after an error, before all others
        self._in_flight: deque[Request] = deque()

    def crops(self, epochs: range, start_step: int) -> Generator[tuple[Job, Tensor], None, None]:
        """Yield jobs and their crops uint8 (B, C, S, S, 3) on the loader's device."""
        threads = max(1, self._loader.workers)
        with (
            ThreadPoolExecutor(threads, "cocor-decode") as self._pool,
            ThreadPoolExecutor(self._read_at_once, "cocor-read") as readers,
            self._loader.prefetch(self._requests_of(epochs, start_step, readers)) as self._requests,
        ):
            try:
                if self._pipeline is None:
                    self._pipeline = self._build()
                while True:
                    crops = self._run()
                    if crops is None:
                        return
                    jobs = self._in_flight.popleft().jobs
                    parts = zip(jobs, crops.split([len(job.planned.index) for job in jobs]), strict=True)
                    yield from (part for part in parts if (part[0].epoch, part[0].step) >= (epochs.start, start_step))
            finally:
                self._drain()

    def _requests_of(
        self, epochs: range, start_step: int, readers: ThreadPoolExecutor
    ) -> Generator[Request, None, None]:
        """Yield requests in order, while files of the next are read."""
        # An image's last bit depends on those that a GPU decodes with it, so each epoch joins the same steps, whatever
        # comes before it and wherever it begins.
        count, pending = self._steps_at_once, deque[Pending]()
        jobs = self._loader.jobs.epochs(epochs, start_step - start_step % count)
        for _, together in groupby(jobs, lambda job: (job.epoch, job.step // count)):
            pending.append(self._feed.begin(list(together), self._pool, readers))
            if len(pending) == _READ_AHEAD:
                yield self._feed.finish(pending.popleft(), self._pool, readers)
        while pending:
            yield self._feed.finish(pending.popleft(), self._pool, readers)

    def _run(self) -> Tensor | None:
        """Return the crops of the oldest request in flight; None at the epoch's end."""
        stream = torch.cuda.current_stream(self._loader.device) if self._loader.on_gpu else None
        while True:
            try:
                (output,) = self._pipeline.run(stream)
                return torch.from_dlpack(output.as_tensor()) if self._crops_by_dali else self._crop(output)
            except StopIteration:
                return None
            except (RuntimeError, MemoryError) as error:
                fault = error.with_traceback(None)  # whose frames would keep the dead pipeline and its memory
            self._start_anew(fault)

    def _crop(self, images: Any) -> Tensor:
        """Cut the crops of the oldest request from its images, in the pool's threads."""
        request, size = self._in_flight[0], self._loader.plan.size
        crops = self._loader.room(request.jobs[0])
        out, boxes = crops.numpy(), request.boxes.astype(np.int32)

        def work(place: int) -> None:
            pixels = np.asarray(images[place])
            height, width, _ = pixels.shape
            if (height, width) != tuple(request.sizes[place]):  # compiled code trusts the boxes to lie inside
                raise RuntimeError(f"an image of {width} x {height} pixels where another size was stated")
            resize_crops(pixels.reshape(-1), height, width, boxes[place], size, out[place])

        list(self._pool.map(work, range(len(images))))
        return crops

    def _start_anew(self, fault: Exception) -> None:
        """Build a new pipeline and queue again what was in flight at ``fault``."""
        self._pipeline = None
        requests, self._in_flight = list(self._in_flight), deque()
        self._again.extendleft(reversed(recover(self._loader, self._feed, fault, requests, self._pool)))
        self._pipeline = self._build()

    def _drain(self) -> None:
        """Run DALI's queue empty, so that the pipeline is ready for another epoch."""
        self._requests = iter(())
        self._again.clear()
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
        """DALI's external source: see :func:`loaders.dali.pipeline.build_pipeline`."""
        request = self._again.popleft() if self._again else next(self._requests)
        request = self._feed.renewed(request, self._pool)
        self._in_flight.append(request)
        return shared(request.files, request.corners if self._crops_by_dali else [])

    def _build(self) -> Any:
        on_gpu = self._loader.on_gpu
        return build_pipeline(
            self._next_inputs,
            batch_size=self._steps_at_once * self._loader.order.local_batch_size,
            crops=self._loader.plan.layout.crops,
            size=self._loader.plan.size,
            filter=self._loader.plan.filter if self._crops_by_dali else None,
            threads=max(1, self._loader.workers),
            device_id=self._loader.device.index if on_gpu else None,
            ahead=_AHEAD,
            gpu_decoder=self._gpu_options() if on_gpu else {},
        )

    def _gpu_options(self) -> dict[str, Any]:
        """Set the hardware decoder's share, and room for the largest image at once."""
        sizes = self._loader.dataset.sizes[~self._feed.on_host]
        height, width = np.minimum(sizes.max(axis=0, initial=1), _LARGEST_HINT).tolist()
        return {
            "hw_decoder_load": self._hw_decoder_load,
            "preallocate_height_hint": height,
            "preallocate_width_hint": width,
        }
