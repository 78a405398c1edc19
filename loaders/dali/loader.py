"""DALI loader: read and decode every file once, cut all crops from that.

    plan -> files and boxes (loaders.dali.inputs) -> DALI (loaders.dali.decoder) -> crops -> torch

DALI makes no random choices: files and boxes come from the plan. On a GPU decoding is "mixed" (nvJPEG and the card's
JPEG engines), crops never leave the GPU, and the batches of several small steps are decoded together. On the CPU DALI
only decodes; crops are resized by :mod:`loaders.kernels.resize`, which takes a fraction of the time of DALI's resize.
"""

from collections.abc import Generator
from typing import Unpack

from torch import Tensor

from loaders.dali import cuda_env
from loaders.dali.decoder import DaliDecoder
from loaders.dali.inputs import Feed
from loaders.dali.pipeline import load_dali
from loaders.datasets.dataset import ImageDataset
from loaders.pipeline.jobs import Job
from loaders.pipeline.loader import LoaderOptions, PipelineLoader
from loaders.views.order import BatchOrder
from loaders.views.plan import ViewPlan

_READ_AT_ONCE = 16
_READ_AT_ONCE_GPU = 64  # 19,000 images a second, of a disk that takes 3 ms for each


class DaliLoader(PipelineLoader):
    """Batches decoded by ``workers`` threads of DALI.

    ``hw_decoder_load`` is the share of JPEGs for the GPU's hardware decoder. ``read_at_once``: files that are read at
    once, ahead of decoding. To hide a disk's latency, it must be more than the latency times the images wanted per
    second; the default is 64 on a GPU and 16 on the CPU. UserError if DALI or the GPU is missing.
    """

    crops_in_background = False

    def __init__(
        self, dataset: ImageDataset, plan: ViewPlan, *, order: BatchOrder, hw_decoder_load: float = 0.65,
        read_at_once: int | None = None, **options: Unpack[LoaderOptions]
    ) -> None:  # fmt: skip
        load_dali()
        super().__init__(dataset, plan, order=order, **options)
        self._hw_decoder_load = hw_decoder_load
        self._read_at_once = read_at_once or (_READ_AT_ONCE_GPU if self.on_gpu else _READ_AT_ONCE)
        self._feed = Feed(self, self._read_at_once)
        if self.on_gpu:
            cuda_env.advise()
        self._decoder: DaliDecoder | None = None

    def crops(self, epochs: range, start_step: int) -> Generator[tuple[Job, Tensor], None, None]:
        if self._decoder is None:
            self._decoder = DaliDecoder(self, self._feed, self._hw_decoder_load, self._read_at_once)
        yield from self._decoder.crops(epochs, start_step)

    def close(self) -> None:
        super().close()
        self._feed.close()
        self._decoder = None
