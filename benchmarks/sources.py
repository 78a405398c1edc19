"""The loaders under test and the baselines, each opened for a stage as an endless stream of batches on the device.

All of them go round and round the images in one long epoch: at its end a loader starts anew, torch's with new worker
processes, which no window should contain. A loader whose library is not installed raises a UserError that says so; the
table shows it.
"""

import itertools
from collections.abc import Callable, Generator
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from typing import Literal, cast, get_args

import torch
from PIL.Image import Image

from loaders.batch import Batch, Loader
from loaders.datasets.dataset import ImageDataset
from loaders.datasets.decode import decode
from loaders.open import LoaderName, open_loader
from loaders.views.order import BatchOrder, CyclicOrder
from loaders.views.plan import ViewPlan
from stages import STAGES, Stage, plan_of, views_of

Contender = Literal["dali", "ffcv", "synthetic", "torch", "dali-auto-aug", "torchvision", "libjpeg-turbo", "pillow"]
CONTENDERS: tuple[Contender, ...] = get_args(Contender)
OURS: tuple[LoaderName, ...] = get_args(LoaderName)

STAGES_OF: dict[Contender, tuple[Stage, ...]] = {
    "dali": STAGES,
    "ffcv": STAGES[1:],  # it decodes as libjpeg-turbo's row does
    "synthetic": STAGES[1:],
    "torch": STAGES,
    "dali-auto-aug": STAGES[1:],  # decodes as DALI's row does
    "torchvision": STAGES,
    "libjpeg-turbo": STAGES[:1],
    "pillow": STAGES[:1],
}

STEPS = 20_000  # of an epoch, more than any row takes
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
    """A stream of batches. ``burst``: how many of them are finished at about the same time. ``note`` is shown in the
    table. ``stack`` holds what is to be closed after the stream."""

    batches: Generator[Sized]
    burst: int = 1
    note: str = ""
    stack: ExitStack = field(default_factory=ExitStack)

    def close(self) -> None:
        """End its threads and processes."""
        self.batches.close()
        self.stack.close()


def open_source(request: Request) -> Source:
    """The stream that ``request`` asks for. UserError if there is no such thing, or its library is missing."""
    if request.contender in OURS:
        return _ours(request)
    openers: dict[Contender, Callable[[Request], Source]] = {
        "dali-auto-aug": _dali,
        "torchvision": _torchvision,
        "libjpeg-turbo": _reference,
        "pillow": _reference,
    }
    return openers[request.contender](request)


def premade(request: Request) -> Source:
    """One finished batch, handed out again and again: a loader that costs nothing."""
    from loaders.synthetic import SyntheticLoader

    loader = SyntheticLoader(
        request.dataset, plan_of(request.stage, request.size), order=_order(request),
        device=request.device, dtype=request.dtype, workers=request.workers, execute=False,
    )  # fmt: skip
    with closing(loader):
        batch = next(iter(loader.epoch(0)))
    return Source((len(batch.index), batch) for _ in itertools.count())


def labelled(request: Request, order: BatchOrder) -> Loader | None:
    """The second loader of training, of the labelled images that steer the MMNN, as ``cocor-train`` opens it. None for
    baselines: they have none of their own."""
    from cocor.config.options import Config
    from cocor.data import labelled_plan

    if request.contender not in OURS:
        return None
    return _open(request, labelled_plan(Config(image_size=request.size)), order, max(1, request.workers // 4))


def _ours(request: Request) -> Source:
    if request.stage == "decode":
        return _dali(request) if request.contender == "dali" else _data_loader_decode(request, decode)
    loader = _open(request, plan_of(request.stage, request.size), _order(request), request.workers)
    return _endless(loader, burst=request.workers if request.contender == "torch" else 1)


def _open(request: Request, plan: ViewPlan, order: BatchOrder, workers: int) -> Loader:
    return open_loader(
        cast(LoaderName, request.contender), request.dataset, plan, order, device=request.device, dtype=request.dtype,
        workers=workers, hw_decoder_load=request.hw_decoder_load,
    )  # fmt: skip


def _order(request: Request) -> CyclicOrder:
    ranks = request.ranks
    return CyclicOrder(
        len(request.dataset), request.batch_size * ranks, steps=STEPS, rank=request.rank, world_size=ranks, seed=1
    )


def _endless(loader: Loader, burst: int = 1) -> Source:
    def batches() -> Generator[Sized]:
        for epoch in itertools.count():
            for batch in loader.epoch(epoch):
                yield len(batch.index), batch

    source = Source(batches(), burst)
    source.stack.enter_context(closing(loader))
    return source


def _data_loader_decode(request: Request, decoder: Callable[[str], Image]) -> Source:
    from baseline_torchvision import Decoded, data_loader

    dataset = Decoded(request.dataset.paths, decoder)
    loader = data_loader(dataset, request.batch_size, request.workers, STEPS, on_gpu=False, sample_bytes=8)
    return Source(((len(heights), None) for _ in itertools.count() for heights in loader), request.workers)


def _torchvision(request: Request) -> Source:
    from baseline_torchvision import Views, data_loader, open_file, to_batch

    if request.stage == "decode":
        return _data_loader_decode(request, open_file)
    dataset = Views(request.dataset.paths, request.stage, request.size)
    sample_bytes = views_of(request.stage) * request.size**2 * 3 * 4
    on_gpu = request.device.type == "cuda"
    # The batch size does not change its rate, but how long it takes all workers to make a batch: half a minute at 256.
    batch_size = request.batch_size if request.stage == "step" else min(request.batch_size, _BASELINE_BATCH)
    loader = data_loader(dataset, batch_size, request.workers, STEPS, on_gpu=on_gpu, sample_bytes=sample_bytes)

    def batches() -> Generator[Sized]:
        for _ in itertools.count():
            for views in loader:
                yield len(views[0]), to_batch(views, request.device, request.dtype)

    return Source(batches(), request.workers)


def _dali(request: Request) -> Source:
    from baseline_dali import batches, pipeline, training_batch

    built = pipeline(
        request.dataset.paths, request.stage, batch_size=request.batch_size, size=request.size,
        threads=request.workers, device=request.device, hw_decoder_load=request.hw_decoder_load,
    )  # fmt: skip

    def sized() -> Generator[Sized]:
        for views in batches(built, request.device):
            batch = training_batch(views, request.device, request.dtype) if request.stage == "step" else None
            yield request.batch_size, batch

    return Source(sized())


def _reference(request: Request) -> Source:
    from references import decoding, pillow_decoder, turbo_decoder

    make = pillow_decoder if request.contender == "pillow" else turbo_decoder
    stack = ExitStack()
    counts, note = stack.enter_context(decoding(make, request.dataset.paths, request.workers))
    return Source(((count, None) for count in counts), note=note, stack=stack)
