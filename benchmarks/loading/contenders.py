"""Contenders: our loaders and their peers, as endless streams of batches.

All go round and round the images in one long epoch: at the end of one, loaders start anew, torch's with new worker
processes, which no window should contain. A missing library is a UserError, which the table shows.
"""

import itertools
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import cast, get_args

import simplejpeg
import torch
from torch import Tensor

from benchmarks.loading import dali_peers, torch_peers
from benchmarks.loading.stages import STAGES, Stage, plan_of, views_of
from loaders.batch import Batch, Loader
from loaders.datasets.dataset import ImageDataset
from loaders.open import LoaderName, open_loader
from loaders.synthetic import SyntheticLoader
from loaders.views.order import BatchOrder, CyclicOrder
from loaders.views.plan import ViewPlan

OURS: tuple[LoaderName, ...] = get_args(LoaderName)
STEPS = 20_000  # of an epoch, more than any case takes
_BASELINE_BATCH = 64
_FILE_BYTES = 1 << 18  # twice ImageNet's mean

Sized = tuple[int, Batch | None]  # the size of a batch, and the batch where it can be trained on


@dataclass(frozen=True)
class Request:
    """One rank's share of the work: ``batch_size`` and ``workers`` are its own."""

    contender: str
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
    """Open the loader of labelled images; None for peers, which have none."""
    return _open(request, plan, order, max(1, request.workers // 4)) if request.contender in OURS else None


def _ours(request: Request) -> Source:
    if request.stage == "decode":
        return _dali(request)
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


def _workers_views(request: Request) -> Source:
    make = torch_peers.VIEWS[request.contender](request.stage, request.size)
    # The batch size does not change its rate, but how long it takes all workers to make a batch: half a minute at 256.
    size = request.batch_size if request.stage == "step" else min(request.batch_size, _BASELINE_BATCH)
    dataset = torch_peers.Each(request.dataset.paths, lambda path: make(torch_peers.open_file(path)))
    sample_bytes = views_of(request.stage) * request.size**2 * 3 * 4
    on_gpu = request.device.type == "cuda"
    loader = torch_peers.data_loader(dataset, size, request.workers, STEPS, on_gpu=on_gpu, sample_bytes=sample_bytes)
    batches = ((len(views[0]), _batch(request, views)) for _ in itertools.count() for views in loader)
    return Source(batches, request.workers)


def _on_device(request: Request) -> Source:
    """Decode files that workers read, and make the views, on the request's device."""
    make = torch_peers.VIEWS[request.contender](request.stage, request.size)
    paths, note = torch_peers.decodable(request.dataset.paths)
    loader = torch_peers.data_loader(
        torch_peers.read_files(paths), request.batch_size, request.workers, STEPS,
        on_gpu=request.device.type == "cuda", sample_bytes=_FILE_BYTES, collate=torch_peers.side_by_side,
    )  # fmt: skip

    def sized() -> Generator[Sized]:
        for _ in itertools.count():
            for images in torch_peers.decoded(loader, request.device):
                make(images)
                yield len(images), None

    return Source(sized(), note=note)


def _dali(request: Request) -> Source:
    built = dali_peers.pipeline(
        request.dataset.paths, request.stage, solo_learn=request.contender == "solo-learn",
        batch_size=request.batch_size, size=request.size, threads=request.workers, device=request.device,
        hw_decoder_load=request.hw_decoder_load,
    )  # fmt: skip

    def sized() -> Generator[Sized]:
        for views in dali_peers.batches(built, request.device):
            images = [view.permute(0, 3, 1, 2) for view in views] if request.stage == "step" else []
            yield request.batch_size, _batch(request, images)

    return Source(sized())


def _batch(request: Request, views: list[Tensor]) -> Batch | None:
    """Move views to the device, and make a batch of them to train on."""
    here = torch_peers.moved(views, request.device, request.dtype)
    return torch_peers.to_batch(here) if request.stage == "step" else None


def _libjpeg_turbo(request: Request) -> Source:
    """Decode in one process a core, and throw the images away."""
    paths, note = torch_peers.decodable(request.dataset.paths)
    dataset = torch_peers.Each(
        [Path(path).read_bytes() for path in paths], lambda file: len(simplejpeg.decode_jpeg(file))
    )
    loader = torch_peers.data_loader(dataset, request.batch_size, request.workers, STEPS, on_gpu=False, sample_bytes=8)
    return Source(((len(batch), None) for _ in itertools.count() for batch in loader), request.workers, note)


@dataclass(frozen=True)
class Contender:
    """How a contender is opened (UserError if its library is missing), and what can be asked of it.

    ``views`` of a sample that it makes in any stage; None: the stage's. ``opens_files``: one by one, while it is
    measured. ``for_gpus``: on a CPU it runs in one thread.
    """

    open: Callable[[Request], Source]
    stages: tuple[Stage, ...] = STAGES[1:]
    views: int | None = None
    opens_files: bool = True
    for_gpus: bool = False


CONTENDERS = {
    "dali": Contender(_ours, STAGES),
    "ffcv": Contender(_ours, opens_files=False),  # decodes as libjpeg-turbo's row does
    "synthetic": Contender(_ours, opens_files=False),
    "torch": Contender(_ours),
    "dali-auto-aug": Contender(_dali),
    "solo-learn": Contender(_dali, ("contrastive",), views=2),
    "torchvision": Contender(_workers_views),
    "torchvision-gpu": Contender(_on_device, STAGES[1:-1], for_gpus=True),
    "kornia": Contender(_on_device, STAGES[1:-1], for_gpus=True),
    "lightly": Contender(_workers_views, ("contrastive",), views=2),
    "libjpeg-turbo": Contender(_libjpeg_turbo, ("decode",), opens_files=False),
}
