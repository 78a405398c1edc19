"""The linear probe by SGD, for ImageNet's size, with the settings that MoCo and SimSiam report.

    moco      SGD, lr 30, batch 256, 100 epochs, x 0.1 at 60 and 80, momentum 0.9, no decay (He et al. 2020)
    simsiam   LARS (trust 0.001), lr 1.6 = 0.1 * 4096 / 256, batch 4096, 90 epochs, cosine, momentum 0.9, no decay

Both sources train on random resized crops, anew in every epoch. Here the frozen features come from the cache, so an
epoch costs next to nothing; without augmentation the accuracy can differ by a point, which the report says.
"""

import math
import time
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from cocor.eval.features import Features
from cocor.eval.linear import check_splits, class_mean, top1

Recipe = Literal["moco", "simsiam"]


@dataclass(frozen=True)
class Settings:
    """``steps_at``: epochs at which the learning rate falls to a tenth; empty: cosine to 0. ``trust`` 0: no LARS."""

    lr: float
    batch_size: int
    epochs: int
    steps_at: tuple[int, ...] = ()
    trust: float = 0.0
    momentum: float = 0.9


RECIPES: dict[Recipe, Settings] = {
    "moco": Settings(lr=30.0, batch_size=256, epochs=100, steps_at=(60, 80)),
    "simsiam": Settings(lr=1.6, batch_size=4096, epochs=90, trust=0.001),
}


@dataclass(frozen=True)
class SgdResult:
    """Test accuracies in [0, 1] of the last epoch."""

    top1: float
    class_mean: float
    train_loss: float
    seconds: float
    train: int
    test: int
    classes: int

    def lines(self) -> list[str]:
        return [
            f"top-1 {self.top1:.2%}, mean per class {self.class_mean:.2%} after the last epoch; "
            f"loss {self.train_loss:.4f}",
            f"{self.train:,} images to learn from (features without augmentation), {self.test:,} to test on, "
            f"{self.classes} classes; {self.seconds:.1f} s",
        ]


def sgd_probe(
    train: Features, test: Features, settings: Settings, *, seed: int = 0, device: torch.device | str = "cpu"
) -> SgdResult:
    """Train a linear layer on all of ``train`` and test it once. A batch larger than the data becomes all of it, with
    the learning rate scaled down in proportion. UserError for splits that no probe can use."""
    began = time.perf_counter()
    train, test = train.labelled().flat(), test.labelled()
    classes = check_splits(train, train, test)
    inputs, labels = train.values.to(device), train.labels.to(device)
    generator = torch.Generator().manual_seed(seed)
    weight = torch.empty(classes, inputs.shape[1]).normal_(0, 0.01, generator=generator).to(device).requires_grad_()
    bias = torch.zeros(classes, device=device, requires_grad=True)
    batch = min(settings.batch_size, len(inputs))
    peak = settings.lr * batch / settings.batch_size
    optimiser = torch.optim.SGD([weight, bias], lr=peak, momentum=settings.momentum)
    loss = torch.zeros(())
    for epoch in range(settings.epochs):
        for group in optimiser.param_groups:
            group["lr"] = peak * _decay(settings, epoch)
        order = torch.randperm(len(inputs), generator=generator).to(device)
        for start in range(0, len(order) - batch + 1, batch):
            chosen = order[start : start + batch]
            optimiser.zero_grad()
            loss = F.cross_entropy(F.linear(inputs[chosen], weight, bias), labels[chosen])
            loss.backward()
            if settings.trust:
                _scale_by_layer((weight, bias), settings.trust)
            optimiser.step()
    with torch.no_grad():
        values = test.values if test.values.ndim == 2 else test.values[:, 4]
        predicted = F.linear(values.to(device), weight, bias).argmax(1).cpu()
    return SgdResult(
        top1(predicted, test.labels),
        class_mean(predicted, test.labels),
        loss.item(),
        time.perf_counter() - began,
        len(train),
        len(test),
        classes,
    )


def _decay(settings: Settings, epoch: int) -> float:
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
