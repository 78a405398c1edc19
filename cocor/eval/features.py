"""Compute the frozen features of a data set once, for every probe.

    Encoder + ImageDataset + crops -> loader -> backbone in eval mode, without gradient -> Features -> cache

A cache entry is named by a digest of the weights, of the data set with the sizes and modification times of its files,
and of the preprocessing, and written whole or not at all: it is never stale, and several commands may share a cache.
Under torchrun every rank computes whole batches of a single process, so features do not depend on the number of ranks.
"""

import hashlib
import json
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import safetensors.torch
import torch
import torch.distributed as dist
from torch import Tensor, nn

from cocor.data import file_states
from cocor.distributed.collectives import World, barrier, together
from cocor.eval.crops import Crop, CropPlan
from cocor.weights.load import Encoder
from loaders.batch import Loader
from loaders.datasets.dataset import ImageDataset, OnError
from loaders.errors import UserError
from loaders.files import replacing
from loaders.open import LoaderName, open_loader
from loaders.progress import track
from loaders.views.order import BatchOrder
from loaders.views.plan import Filter, ViewPlan

_SHARED_ROWS = 65536  # rows of one exchange between ranks
_CONSTANT = 1e-3  # standard deviation as a share of the norm, below which features count as constant
_log = logging.getLogger(__name__)

ONE_PROCESS = World(0, 0, 1, torch.device("cpu"))


@dataclass(frozen=True)
class Features:
    """Features of N images, float32 (N, D), or (N, 10, D) of ten crops, and labels.

    Images that could not be read have NaN; they, and those of unknown class, have label -1.
    """

    values: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def to(self, device: torch.device) -> "Features":
        """Move the samples to ``device``."""
        return Features(self.values.to(device), self.labels.to(device))

    def subset(self, index: Tensor) -> "Features":
        """Choose the samples ``index`` (M,), int64."""
        if len(index) == len(self) and torch.equal(index, torch.arange(len(self), device=index.device)):
            return self  # no copy of what may be 10 GB
        return Features(self.values[index], self.labels[index])

    def labelled(self) -> "Features":
        """Choose the samples with known labels."""
        return self.subset((self.labels >= 0).nonzero().flatten())

    def usable(self) -> Tensor:
        """Return the places int64 (M,) of the images that could be read."""
        return (~self.values.flatten(1)[:, 0].isnan()).nonzero().flatten()

    def flat(self) -> "Features":
        """Make every crop a sample of its own: (N * crops, D)."""
        if self.values.ndim == 2:
            return self
        return Features(self.values.flatten(0, 1), self.labels.repeat_interleave(self.values.shape[1]))


def joined(first: Features, second: Features) -> Features:
    """Concatenate the samples of two, which hold the same number of crops."""
    return Features(torch.cat([first.values, second.values]), torch.cat([first.labels, second.labels]))


@dataclass(frozen=True)
class Extraction:
    """Settings of feature extraction; ``size`` in pixels, ``cache`` a folder."""

    crop: Crop = "full"
    filter: Filter = "bicubic"
    size: int = 224
    loader: LoaderName = "torch"
    precision: torch.dtype = torch.float32
    batch_size: int = 256
    workers: int | None = None
    cache: Path | None = None
    world: World = ONE_PROCESS
    on_error: OnError = "stop"

    def key(self, encoder: Encoder, dataset: ImageDataset) -> str:
        """Return the name of a cache entry: equal for equal features."""
        parts: list[str | int] = [encoder.digest, encoder.architecture, encoder.stem, dataset.digest]
        parts += [self.crop, self.filter, self.size, self.loader, str(self.precision)]
        content = [*parts, encoder.mean, encoder.std, file_states(dataset)]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:32]

    def path(self, encoder: Encoder, dataset: ImageDataset) -> Path | None:
        """Return the file of the cache for these features."""
        return None if self.cache is None else self.cache / f"{self.key(encoder, dataset)}.safetensors"

    def open_loader(
        self, dataset: ImageDataset, plan: ViewPlan, order: BatchOrder, mean: Sequence[float], std: Sequence[float]
    ) -> Loader:
        """Open a loader of these images; ``mean`` and ``std`` are those of the encoder that is to see them."""
        return open_loader(
            self.loader, dataset, plan, order, device=self.world.device, workers=self.workers, on_error=self.on_error,
            mean=mean, std=std,
        )  # fmt: skip


def features_of(encoder: Encoder, dataset: ImageDataset, how: Extraction, name: str = "features") -> Features:
    """Compute the features of ``dataset`` in its order, or read them from the cache.

    Raises:
        UserError: images that cannot be read, or features that are not finite.
    """
    path = how.path(encoder, dataset)
    values = _from_cache(path, len(dataset), how)
    if values is None:
        values = _compute(encoder, dataset, how, name)
        _write_cache(values, path, how)
    features = Features(values, torch.from_numpy(dataset.labels.copy()))
    usable = features.usable()
    features.labels[torch.isin(torch.arange(len(dataset)), usable, invert=True)] = -1
    if how.world.main:
        _warn_of_collapse(features.subset(usable).values, name)
        if len(usable) < len(dataset):
            _log.warning(f"{name}: {len(dataset) - len(usable):,} images that cannot be read are left out")
    return features


def _compute(encoder: Encoder, dataset: ImageDataset, how: Extraction, name: str) -> Tensor:
    began = time.perf_counter()
    values, left_out = _extract(encoder, dataset, how, name)
    seconds = time.perf_counter() - began
    if how.world.main:
        _log.info(f"{name}: {len(dataset):,} in {seconds:.1f} s, {len(dataset) / seconds:,.0f} images/s")
    bad = torch.cat([~part.flatten(1).isfinite().all(1) for part in values.split(_SHARED_ROWS)]).nonzero()
    if len(bad):
        which = f"of {len(bad):,} of {len(values):,} images (first: number {int(bad[0])}) "
        raise UserError(f"{name}: features {which}are not finite; the weights are broken, or try --precision fp32")
    values[left_out] = torch.nan
    return values


def _from_cache(path: Path | None, count: int, how: Extraction) -> Tensor | None:
    """Return the cached features if every rank has them: ranks need not share a disk, but compute together."""
    if path is None:
        return None
    values = None
    with suppress(OSError, KeyError, safetensors.SafetensorError):  # missing or damaged
        values = safetensors.torch.load_file(path)["features"]
    of_another_call = values is not None and how.on_error == "stop" and values.flatten(1)[:, 0].isnan().any()
    if values is None or len(values) != count or of_another_call:  # one that left images out
        values = None
    if how.world.size > 1:
        have = torch.tensor(int(values is not None), device=how.world.device)
        dist.all_reduce(have, dist.ReduceOp.MIN)
        return values if have.item() else None
    return values


def _write_cache(values: Tensor, path: Path | None, how: Extraction) -> None:
    """Write ``values`` to the cache. A failure costs a warning, not the features."""
    if path is not None and how.world.main:
        try:
            with replacing(path) as temporary:
                safetensors.torch.save_file({"features": values.contiguous()}, temporary)
        except (UserError, safetensors.SafetensorError) as error:
            place = f"--cache {path.parent}"
            _log.warning(f"features are not kept, and will be made again next time; {place}: {error}")
    barrier()


@torch.no_grad()
def _extract(encoder: Encoder, dataset: ImageDataset, how: Extraction, name: str) -> tuple[Tensor, Tensor]:
    """Return the features of all images, 0 for those that could not be read, and which (N,) these are."""
    world, count, backbone = how.world, len(dataset), encoder.backbone
    rows = torch.from_numpy(_rows_of_rank(count, how.batch_size, world))
    backbone.to(world.device)
    if world.device.type == "cuda":
        backbone.to(memory_format=torch.channels_last)
    left_out = torch.zeros(count, dtype=torch.bool)
    left_out[rows] = True
    found = torch.zeros(count, *_shape(encoder, how))

    def fill_own() -> None:
        with evaluating(backbone):
            for index, batch_features in encoded(encoder, dataset.subset(rows.numpy()), how, name):
                found[rows[index]], left_out[rows[index]] = batch_features, False

    together(fill_own)
    if world.size > 1:  # rows of other ranks are zero here, so the sums are exact
        for part in (*found.split(_SHARED_ROWS), left_out):
            shared = part.to(world.device, torch.float32)
            dist.all_reduce(shared)
            part.copy_(shared)
    return found, left_out


def _shape(encoder: Encoder, how: Extraction) -> tuple[int, ...]:
    """Return the shape of an image's features: (D,), or (10, D) of ten crops."""
    black = torch.zeros(1, encoder.channels, how.size, how.size, device=how.world.device)
    with torch.no_grad(), evaluating(encoder.backbone):
        width = encode(encoder.backbone, black, how).shape[1]
    return (10, width) if how.crop == "ten" else (width,)


def encoded(encoder: Encoder, dataset: ImageDataset, how: Extraction, name: str) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (places, features (B, D) or (B, 10, D), float32 on the CPU) of each batch."""
    if not len(dataset):
        return
    plan = CropPlan(size=how.size, crop=how.crop, filter=how.filter)
    order = BatchOrder(len(dataset), how.batch_size, shuffle=False, drop_last=False)
    loader = how.open_loader(dataset, plan, order, encoder.mean, encoder.std)
    with closing(loader), closing(loader.epoch(0)) as batches:
        for batch in track(batches, len(dataset), name, "images", how.batch_size):
            output = encode(encoder.backbone, batch.original, how)
            views = output.view(plan.views, len(batch.index), -1).transpose(0, 1)
            yield batch.index.cpu(), views[:, 0].cpu() if plan.views == 1 else views.cpu()


@torch.no_grad()
def encode(backbone: nn.Module, images: Tensor, how: Extraction) -> Tensor:
    """Encode ``images`` (N, C, H, W) to features float32 (N, D), in evaluation mode."""
    with torch.autocast(images.device.type, how.precision, enabled=how.precision != torch.float32):
        try:
            output: Tensor = backbone(images).float()
        except (AssertionError, ValueError) as error:  # transformers take one size only
            raise UserError(f"--image-size {images.shape[-1]}: the encoder refuses it: {error}") from None
    if output.ndim != 2:
        raise UserError(f"the encoder gives {tuple(output.shape[1:])} an image instead of one feature vector")
    return output


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Put ``module`` into evaluation mode; afterwards parts return to their own."""
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode


def _rows_of_rank(count: int, batch_size: int, world: World) -> np.ndarray:
    """Choose the images of every ``size``-th batch: the batches are those of a single process."""
    rows = np.arange(count, dtype=np.int64)
    return rows[rows // batch_size % world.size == world.rank]


def _warn_of_collapse(values: Tensor, name: str) -> None:
    """Warn of features that are nearly constant, before a probe reports chance."""
    sample = values.flatten(0, -2)[:: max(1, len(values) // 4096)]
    norm = sample.norm(dim=1).mean().item()
    spread = (sample - sample.mean(0)).norm(dim=1).mean().item()
    if len(sample) > 1 and spread <= _CONSTANT * norm:
        _log.warning(f"{name}: features hardly differ (spread {spread:.2g}, norm {norm:.2g}): collapsed?")


def summary(features: Features) -> dict[str, float | int]:
    """Summarise features for a report, so that it shows the cause of a low accuracy."""
    values = features.subset(features.usable()).values.flatten(0, -2)
    labels = features.labels[features.labels >= 0]
    norm, spread = values.norm(dim=1).mean().item(), (values - values.mean(0)).norm(dim=1).mean().item()
    counts = {"images": len(features), "classes": len(labels.unique()), "dimensions": values.shape[-1]}
    return counts | {"mean_norm": round(norm, 4), "spread": round(spread, 4)}
