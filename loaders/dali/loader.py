"""The DALI loader: every file is read and decoded once, and every crop is a region-of-interest resize of that decode.

    plan -> files and boxes (loaders.dali.inputs) -> DALI (loaders.dali.decoder) -> crops -> torch

DALI makes no random choices: files and boxes come from the plan. On a GPU decoding is "mixed" (nvJPEG and the card's
JPEG engines), crops never leave the GPU, and the batches of several small steps are decoded together. On the CPU DALI
only decodes; crops are resized by :mod:`loaders.kernels.resize`, which takes a fraction of the time of DALI's resize.
"""

from collections.abc import Generator
from typing import Unpack

from torch import Tensor

from loaders.batch import Batch
from loaders.dali import cuda_env
from loaders.dali.decoder import DaliDecoder
from loaders.dali.inputs import Feed
from loaders.dali.pipeline import load_dali
from loaders.datasets.dataset import ImageDataset
from loaders.pipeline.delivery import Delivery, DeliveryOptions
from loaders.pipeline.jobs import Job
from loaders.views.order import BatchOrder
from loaders.views.plan import ViewPlan

_READ_AT_ONCE = 16
_READ_AT_ONCE_GPU = 64  # 19,000 images a second, of a disk that takes 3 ms for each


class DaliLoader:
    """Batches of ``dataset`` as ``plan`` and ``order`` say, on ``device``.

    ``workers`` is the number of DALI's threads, ``hw_decoder_load`` the share of JPEGs for the GPU's hardware decoder.
    ``read_at_once``: files that are read at once, ahead of decoding. To hide a disk's latency, it must be more than the
    latency times the images wanted per second; the default is 64 on a GPU and 16 on the CPU.
    Other ``options``: :class:`DeliveryOptions`. UserError if DALI or the GPU is missing.
    """

    def __init__(
        self,
        dataset: ImageDataset,
        plan: ViewPlan,
        *,
        order: BatchOrder,
        hw_decoder_load: float = 0.65,
        read_at_once: int | None = None,
        **options: Unpack[DeliveryOptions],
    ) -> None:
        load_dali()
        self._delivery = Delivery(dataset, plan, order, **options)
        self._hw_decoder_load = hw_decoder_load
        self._read_at_once = read_at_once or (_READ_AT_ONCE_GPU if self._delivery.on_gpu else _READ_AT_ONCE)
        self._feed = Feed(self._delivery, self._read_at_once)
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
        self._feed.close()
        self._decoder = None

    def _pairs(self, epoch: int, start_step: int) -> Generator[tuple[Job, Tensor], None, None]:
        """Jobs and their crops uint8 (B, C, S, S, 3) on the loader's device."""
        # Taken while the epoch is open: if a hung disk keeps it from ending, the next epoch makes a decoder of its own.
        decoder, self._decoder = self._decoder or self._make_decoder(), None
        try:
            yield from decoder.pairs(epoch, start_step)
        finally:
            self._decoder = decoder

    def _make_decoder(self) -> DaliDecoder:
        return DaliDecoder(self._delivery, self._feed, self._hw_decoder_load, self._read_at_once)
