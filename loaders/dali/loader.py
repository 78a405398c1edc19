"""DALI loader: read and decode every file once, cut all crops from that.

    plan -> file names and boxes (loaders.dali.inputs) -> DALI (loaders.dali.decoder) -> crops -> torch

DALI makes no random choices: files and boxes come from the plan. On a GPU decoding is "mixed" (nvJPEG and the card's
JPEG engines), crops never leave the GPU, and the batches of several small steps are decoded together. On the CPU DALI
only decodes; crops are resized by :mod:`loaders.kernels.resize`, which takes a fraction of the time of DALI's resize.
"""

import resource
from collections.abc import Generator
from typing import Unpack

from torch import Tensor

from loaders.dali import cuda_env
from loaders.dali.decoder import GPU_BATCH, DaliDecoder
from loaders.dali.inputs import Feed
from loaders.dali.pipeline import load_dali
from loaders.datasets.dataset import ImageDataset
from loaders.pipeline.jobs import Job
from loaders.pipeline.loader import LoaderOptions, PipelineLoader
from loaders.views.order import BatchOrder
from loaders.views.plan import ViewPlan

_OPEN_BATCHES = 8  # more than are in all queues together


class DaliLoader(PipelineLoader):
    """Batches decoded by ``workers`` threads of DALI.

    ``hw_decoder_load`` is the share of JPEGs for the GPU's hardware decoder. UserError if DALI or the GPU is missing.
    """

    crops_in_background = False

    def __init__(
        self, dataset: ImageDataset, plan: ViewPlan, *, order: BatchOrder, hw_decoder_load: float = 0.65,
        **options: Unpack[LoaderOptions]
    ) -> None:  # fmt: skip
        load_dali()
        _allow_open_files(_OPEN_BATCHES * max(order.local_batch_size, GPU_BATCH))
        super().__init__(dataset, plan, order=order, **options)
        self._feed = Feed(self)
        self._hw_decoder_load = hw_decoder_load
        if self.on_gpu:
            cuda_env.advise()
        self._decoder: DaliDecoder | None = None

    def crops(self, epoch: int, start_step: int) -> Generator[tuple[Job, Tensor], None, None]:
        # Taken while the epoch is open: if a hung disk keeps it from ending, the next epoch makes a decoder of its own.
        decoder, self._decoder = self._decoder or DaliDecoder(self, self._feed, self._hw_decoder_load), None
        try:
            yield from decoder.crops(epoch, start_step)
        finally:
            self._decoder = decoder

    def close(self) -> None:
        super().close()
        self._decoder = None


def _allow_open_files(count: int) -> None:
    """Raise this process's limit by ``count`` open files, as far as is allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + 1024 if hard == resource.RLIM_INFINITY else min(count + 1024, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
