"""Run the linear probe by SGD, for ImageNet's size, as MoCo and SimSiam do.

Both sources (see :data:`cocor.eval.datasets.protocols.RECIPES`) learn from random resized crops, anew in every epoch.
From cached features an epoch costs next to nothing, but without augmentation the accuracy can differ by points.
"""

import math
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from cocor.distributed.collectives import gather
from cocor.eval.datasets.protocols import RANDOM_CROP_SCALE, SgdSettings
from cocor.eval.features import Extraction, Features, encode, evaluating
from cocor.eval.probes.linear import check_splits, class_mean, top1
from cocor.weights.load import Encoder
from loaders.datasets.dataset import ImageDataset
from loaders.errors import UserError
from loaders.progress import track
from loaders.views.order import BatchOrder
from loaders.views.plan import ViewPlan

_SEED = 0  # of order, crops and first weights


@dataclass(frozen=True)
class SgdResult:
    """Test accuracies in [0, 1] after the last epoch; ``views`` of training, in words."""

    top1: float
    class_mean: float
    train_loss: float
    seconds: float
    train: int
    test: int
    classes: int
    epochs: int
    views: str

    def lines(self) -> list[str]:
        """Format the report for people."""
        return [
            f"top-1 {self.top1:.2%}, mean per class {self.class_mean:.2%} after {self.epochs} epochs; "
            f"loss {self.train_loss:.4f}",
            f"{self.train:,} images to learn from ({self.views}), {self.test:,} to test on, "
            f"{self.classes} classes; {self.seconds:.1f} s",
        ]


class FixedViews:
    """Cached features, the same in every epoch, reshuffled; short batches are dropped."""

    description = "features without augmentation"

    def __init__(self, features: Features, settings: SgdSettings, device: torch.device | str) -> None:
        features = features.labelled().flat()
        self.labels, self._device = features.labels, device
        self._values = features.values.to(device)
        self.batch = min(settings.batch_size, len(features))
        self._generator = torch.Generator().manual_seed(_SEED)

    def epoch(self, number: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield features (batch, D) and labels (batch,) of every step, on every rank."""
        order = torch.randperm(len(self.labels), generator=self._generator)
        for chosen in order.split(self.batch):
            if len(chosen) == self.batch:
                yield self._values[chosen.to(self._device)], self.labels[chosen].to(self._device)


class RandomCrops:
    """New random resized crops and flips in every epoch, encoded by all ranks.

    Images that fill no batch are dropped.
    """

    description = "random resized crops and flips"

    def __init__(self, encoder: Encoder, dataset: ImageDataset, settings: SgdSettings, how: Extraction) -> None:
        dataset = dataset.subset((dataset.labels >= 0).nonzero()[0])
        self.labels = torch.from_numpy(dataset.labels.copy())
        step = min(settings.batch_size, len(dataset))
        world, together = how.world, shared_batch(step, how)  # a step is one or more of these batches
        self.batch = step // together * together
        self._encoder, self._how = encoder, how
        plan = ViewPlan(how.size, _SEED, (), "shared", original_scale=RANDOM_CROP_SCALE, lengths=(), filter=how.filter)
        order = BatchOrder(len(dataset), together, rank=world.rank, world_size=world.size, seed=_SEED)
        self._loader = how.open_loader(dataset, plan, order, encoder.mean, encoder.std)
        self._together = together

    def epoch(self, number: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield features (batch, D) and labels (batch,) of every step, on every rank."""
        backbone = self._encoder.backbone.to(self._how.world.device)
        values: list[Tensor] = []
        labels: list[Tensor] = []
        name = f"epoch {number + 1}"
        with evaluating(backbone), closing(self._loader.epoch(number)) as batches:
            for batch in track(batches, len(self.labels), name, "images", self._together):
                values.append(gather(encode(backbone, batch.original, self._how)))
                labels.append(gather(batch.label))
                if len(values) * self._together == self.batch:
                    yield torch.cat(values), torch.cat(labels)
                    values, labels = [], []

    def close(self) -> None:
        self._loader.close()


def sgd_probe(
    train: Features, test: Features, settings: SgdSettings, *, device: torch.device | str = "cpu"
) -> SgdResult:
    """Train a linear layer on all of ``train`` and test it once.

    A batch larger than the data becomes all of it, with the learning rate scaled down in proportion.
    """
    check_splits(train.labels, train.labels, test.labels)
    return _probe(FixedViews(train, settings, device), test, settings, device)


def sgd_probe_on_crops(
    encoder: Encoder, train: ImageDataset, test: Features, settings: SgdSettings, how: Extraction
) -> SgdResult:
    """Train as :func:`sgd_probe` does, on random crops; all ranks get one result."""
    labels = torch.from_numpy(train.labels.copy())
    check_splits(labels, labels, test.labels)
    with closing(RandomCrops(encoder, train, settings, how)) as views:
        return _probe(views, test, settings, how.world.device)


def shared_batch(count: int, how: Extraction) -> int:
    """Count the images that all ranks encode together. UserError for too few."""
    size = how.world.size
    if count < size:
        raise UserError(f"{count} images with labels cannot be shared by {size} ranks")
    return max(1, min(how.batch_size, count) // size) * size


def shortened(settings: SgdSettings, epochs: int | None) -> SgdSettings:
    """Scale ``settings`` to ``epochs``; the rate falls at the same shares of them."""
    if epochs is None:
        return settings
    steps = tuple(round(at * epochs / settings.epochs) for at in settings.steps_at)
    return replace(settings, epochs=epochs, steps_at=steps)


def _probe(
    views: FixedViews | RandomCrops, test: Features, settings: SgdSettings, device: torch.device | str
) -> SgdResult:
    began = time.perf_counter()
    test = test.labelled()
    classes = int(views.labels.max()) + 1
    values = test.values if test.values.ndim == 2 else test.values[:, 4]
    generator = torch.Generator().manual_seed(_SEED)
    weight = torch.empty(classes, values.shape[1]).normal_(0, 0.01, generator=generator).to(device).requires_grad_()
    bias = torch.zeros(classes, device=device, requires_grad=True)
    peak = settings.lr * views.batch / settings.batch_size
    optimiser = torch.optim.SGD([weight, bias], lr=peak, momentum=settings.momentum)
    loss = torch.zeros(())
    for epoch in range(settings.epochs):
        for group in optimiser.param_groups:
            group["lr"] = peak * _decay(settings, epoch)
        for inputs, labels in views.epoch(epoch):
            optimiser.zero_grad()
            loss = F.cross_entropy(F.linear(inputs, weight, bias), labels)
            loss.backward()
            if settings.trust:
                _scale_by_layer((weight, bias), settings.trust)
            optimiser.step()
    if not torch.isfinite(loss):
        raise UserError("the classifier's loss is no number: its learning rate does not suit these features")
    with torch.no_grad():
        predicted = F.linear(values.to(device), weight, bias).argmax(1).cpu()
    scores = top1(predicted, test.labels), class_mean(predicted, test.labels), loss.item()
    counts = len(views.labels), len(test), classes, settings.epochs
    return SgdResult(*scores, time.perf_counter() - began, *counts, views.description)


def _decay(settings: SgdSettings, epoch: int) -> float:
    if settings.steps_at:
        return float(0.1 ** sum(epoch >= at for at in settings.steps_at))
    return 0.5 * (1 + math.cos(math.pi * epoch / settings.epochs))


@torch.no_grad()
def _scale_by_layer(parameters: tuple[Tensor, ...], trust: float) -> None:
    """LARS without clipping and decay, as SimSiam's probe uses it: a parameter of zero norm keeps its gradient."""
    for parameter in parameters:
        assert parameter.grad is not None
        size, slope = parameter.norm(), parameter.grad.norm()
        usable = (size > 0) & (slope > 0)
        parameter.grad.mul_(torch.where(usable, trust * size / slope.clamp(min=1e-30), torch.ones_like(size)))
