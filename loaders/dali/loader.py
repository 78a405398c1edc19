"""The DALI loader: every file is read and decoded once, and every crop is a region-of-interest resize of that decode.

    plan -> file names and boxes (loaders.dali.inputs) -> DALI (loaders.dali.decoder) -> crops -> torch

DALI makes no random choices: files and boxes come from the plan. On a GPU decoding is "mixed" (nvJPEG and the card's
JPEG engines), crops never leave the GPU, and the batches of several small steps are decoded together. On the CPU DALI
only decodes; crops are resized by :mod:`loaders.kernels.resize`, which takes a fraction of the time of DALI's resize.
"""

import resource
from collections.abc import Generator
from typing import Unpack

from torch import Tensor

from loaders.batch import Batch
from loaders.dali import cuda_env
from loaders.dali.decoder import GPU_BATCH, DaliDecoder
from loaders.dali.inputs import Feed
from loaders.dali.pipeline import load_dali
from loaders.datasets.dataset import ImageDataset
from loaders.pipeline.delivery import Delivery, DeliveryOptions
from loaders.pipeline.jobs import Job
from loaders.views.order import BatchOrder
from loaders.views.plan import ViewPlan

_OPEN_BATCHES = 8  # more than are in all queues together


class DaliLoader:
    """Batches of ``dataset`` as ``plan`` and ``order`` say, on ``device``.

    ``workers`` is the number of DALI's threads, ``hw_decoder_load`` the share of JPEGs for the GPU's hardware decoder.
    Other ``options``: :class:`DeliveryOptions`. UserError if DALI or the GPU is missing.
    """

    def __init__(
        self,
        dataset: ImageDataset,
        plan: ViewPlan,
        *,
        order: BatchOrder,
        hw_decoder_load: float = 0.65,
        **options: Unpack[DeliveryOptions],
    ) -> None:
        load_dali()
        _allow_open_files(_OPEN_BATCHES * max(order.local_batch_size, GPU_BATCH))
        self._delivery = Delivery(dataset, plan, order, **options)
        self._feed = Feed(self._delivery)
        self._hw_decoder_load = hw_decoder_load
        if self._delivery.on_gpu:
            cuda_env.advise()
        self._decoder: DaliDecoder | None = None

    @property
    def steps_per_epoch(self) -> int:
        return self._delivery.order.steps

    def epoch(self, e: int, start_step: int = 0) -> Generator[Batch, None, None]:
        return self._delivery.deliver(self._pairs(e, start_step), in_background=False)

    def reading(self) -> list[str]:
        return self._delivery.reading()

    def close(self) -> None:
        self._delivery.close()
        self._decoder = None

    def _pairs(self, epoch: int, start_step: int) -> Generator[tuple[Job, Tensor], None, None]:
        """Jobs and their crops uint8 (B, C, S, S, 3) on the loader's device."""
        # Taken while the epoch is open: if a hung disk keeps it from ending, the next epoch makes a decoder of its own.
        decoder, self._decoder = self._decoder or DaliDecoder(self._delivery, self._feed, self._hw_decoder_load), None
        try:
            yield from decoder.pairs(epoch, start_step)
        finally:
            self._decoder = decoder


def _allow_open_files(count: int) -> None:
    """Raise this process's soft limit by ``count`` open files, as far as its hard limit allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + 1024
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
