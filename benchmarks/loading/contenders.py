"""Contenders: our loaders and the baselines, as endless streams of batches.

All go round and round the images in one long epoch: at the end of one, loaders start anew, torch's with new worker
processes, which no window should contain. A missing library is a UserError, which the table shows.
"""

import itertools
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

import simplejpeg
import torch

from benchmarks.loading import baselines
from benchmarks.loading.stages import STAGES, Stage, plan_of, views_of
from loaders.batch import Batch, Loader
from loaders.datasets.dataset import ImageDataset
from loaders.datasets.decode import decode
from loaders.open import LoaderName, open_loader
from loaders.synthetic import SyntheticLoader
from loaders.views.order import BatchOrder, CyclicOrder
from loaders.views.plan import ViewPlan

Contender = Literal["dali", "ffcv", "synthetic", "torch", "dali-auto-aug", "torchvision", "libjpeg-turbo", "pillow"]
CONTENDERS: tuple[Contender, ...] = get_args(Contender)
OURS: tuple[LoaderName, ...] = get_args(LoaderName)

STAGES_OF: dict[Contender, tuple[Stage, ...]] = {  # FFCV decodes as libjpeg-turbo's row does, auto-aug as DALI's
    "dali": STAGES, "ffcv": STAGES[1:], "synthetic": STAGES[1:], "torch": STAGES, "dali-auto-aug": STAGES[1:],
    "torchvision": STAGES, "libjpeg-turbo": STAGES[:1], "pillow": STAGES[:1],
}  # fmt: skip

STEPS = 20_000  # of an epoch, more than any case takes
_BASELINE_BATCH = 64

Sized = tuple[int, Batch | None]  # the size of a batch, and the batch where it can be trained on


@dataclass(frozen=True)
class Request:
    """One rank's share of the work: ``batch_size`` and ``workers`` are its own."""

    contender: Contender
    stage: Stage
    dataset: ImageDataset
    batch_size: int
    size: int
    device: torch.device
    dtype: torch.dtype
    workers: int
    hw_decoder_load: float
    rank: int = 0
    ranks: int = 1


@dataclass
class Source:
    """Stream of batches, ``burst`` of which end at about the same time."""

    batches: Generator[Sized]
    burst: int = 1
    note: str = ""
    loader: Loader | None = None

    def close(self) -> None:
        """End the threads and processes."""
        self.batches.close()
        if self.loader is not None:
            self.loader.close()


def open_source(request: Request) -> Source:
    """Open the stream that ``request`` asks for. UserError if its library is missing."""
    if request.contender in OURS:
        return _ours(request)
    openers: dict[Contender, Callable[[Request], Source]] = {
        "dali-auto-aug": _dali, "torchvision": _torchvision, "libjpeg-turbo": _decoder, "pillow": _decoder,
    }  # fmt: skip
    return openers[request.contender](request)


def premade(request: Request) -> Source:
    """Hand out one finished batch again and again: a loader that costs nothing."""
    batch = synthetic_batch(request, plan_of(request.stage, request.size), _order(request), request.workers)
    return Source((len(batch.index), batch) for _ in itertools.count())


def synthetic_batch(request: Request, plan: ViewPlan, order: BatchOrder, workers: int = 1) -> Batch:
    """Make one batch of noise."""
    loader = SyntheticLoader(
        request.dataset, plan, order=order, device=request.device, dtype=request.dtype, workers=workers, execute=False
    )
    with closing(loader):
        return next(iter(loader.epoch(0)))


def labelled(request: Request, plan: ViewPlan, order: BatchOrder) -> Loader | None:
    """Open the loader of labelled images; None for baselines, which have none."""
    return _open(request, plan, order, max(1, request.workers // 4)) if request.contender in OURS else None


def _ours(request: Request) -> Source:
    if request.stage == "decode":
        return _dali(request) if request.contender == "dali" else _data_loader_decode(request, decode)
    loader = _open(request, plan_of(request.stage, request.size), _order(request), request.workers)
    batches = ((len(batch.index), batch) for epoch in itertools.count() for batch in loader.epoch(epoch))
    return Source(batches, burst=request.workers if request.contender == "torch" else 1, loader=loader)


def _open(request: Request, plan: ViewPlan, order: BatchOrder, workers: int) -> Loader:
    return open_loader(
        cast(LoaderName, request.contender), request.dataset, plan, order, device=request.device, dtype=request.dtype,
        workers=workers, hw_decoder_load=request.hw_decoder_load,
    )  # fmt: skip


def _order(request: Request) -> CyclicOrder:
    total, ranks = request.batch_size * request.ranks, request.ranks
    return CyclicOrder(len(request.dataset), total, steps=STEPS, rank=request.rank, world_size=ranks, seed=1)


def _data_loader_decode(
    request: Request, decoder: Callable[[Any], object], files: Sequence[Any] = (), note: str = ""
) -> Source:
    """Decode ``files``, by default all, in one process a core."""
    dataset = baselines.Decoded(files or request.dataset.paths, decoder)
    loader = baselines.data_loader(dataset, request.batch_size, request.workers, STEPS, on_gpu=False, sample_bytes=8)
    return Source(((len(batch), None) for _ in itertools.count() for batch in loader), request.workers, note)


def _torchvision(request: Request) -> Source:
    if request.stage == "decode":
        return _data_loader_decode(request, baselines.open_file)
    dataset = baselines.Views(request.dataset.paths, request.stage, request.size)
    # The batch size does not change its rate, but how long it takes all workers to make a batch: half a minute at 256.
    size = request.batch_size if request.stage == "step" else min(request.batch_size, _BASELINE_BATCH)
    sample_bytes, on_gpu = views_of(request.stage) * request.size**2 * 3 * 4, request.device.type == "cuda"
    loader = baselines.data_loader(dataset, size, request.workers, STEPS, on_gpu=on_gpu, sample_bytes=sample_bytes)
    endless = (views for _ in itertools.count() for views in loader)
    batches = ((len(views[0]), baselines.to_batch(views, request.device, request.dtype)) for views in endless)
    return Source(batches, request.workers)


def _dali(request: Request) -> Source:
    built = baselines.pipeline(
        request.dataset.paths, request.stage, batch_size=request.batch_size, size=request.size,
        threads=request.workers, device=request.device, hw_decoder_load=request.hw_decoder_load,
    )  # fmt: skip

    def sized() -> Generator[Sized]:
        for views in baselines.batches(built, request.device):
            ready = request.stage == "step"
            images = [view.permute(0, 3, 1, 2) for view in views]
            yield request.batch_size, baselines.to_batch(images, request.device, request.dtype) if ready else None

    return Source(sized())


def _decoder(request: Request) -> Source:
    decoder = baselines.pillow_decode if request.contender == "pillow" else simplejpeg.decode_jpeg
    files, note = baselines.decodable(decoder, request.contender, request.dataset.paths)
    return _data_loader_decode(request, decoder, files, note)
