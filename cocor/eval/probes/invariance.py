"""Measure what features keep of the changes that training may teach to ignore.

    composition   how often each basic augmentation was applied: ridge regression from the features of a composite and
                  of its image to the 14 counts, R^2 of each
    colour        which of six hue shifts an image has: softmax regression on its features
    orientation   which of four quarter turns an image has, likewise
    same colour   how many of an image's nearest neighbours have its hue shift

The regressions learn from 60 % of the images, choose their penalty on 20 % and are tested on the remaining 20 %.
Composites are one of each length from 1 to 4, the last of which no recipe trains on. The regression sees the features
of both images side by side. Their difference is a special case of that, and keeps less (mean R^2 0.139 against 0.150
on 1,000 images of CIFAR-10 with an untrained ResNet-18).
"""

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cocor.eval.crops import Crop, CropPlan
from cocor.eval.features import Extraction, Features, encode, evaluating
from cocor.eval.probes.knn import nearest_neighbours
from cocor.eval.probes.linear import PENALTIES, linear_probe
from cocor.weights.load import Encoder
from loaders.datasets.dataset import ImageDataset
from loaders.errors import UserError
from loaders.progress import track
from loaders.views.ops import BASIC, END, Op
from loaders.views.order import BatchOrder
from loaders.views.plan import PlannedBatch, ViewPlan

LENGTHS = 1, 2, 3, 4
HUES, TURNS, NEIGHBOURS = 6, 4, 10
LEAST_IMAGES = 50  # 10 images to test on
_SHARES = 0.6, 0.8  # where training images end, and validation images
_RIDGE = tuple(10.0**power for power in range(-7, 3))  # penalties, as shares of the mean eigenvalue
_SOFTMAX = PENALTIES[12::4]  # 1e-3 to 1e5 in powers of ten: weaker ones take minutes on a CPU and are never chosen


@dataclass(frozen=True)
class InvariancePlan(ViewPlan):
    """View plan of an image, its composites, and a copy of another hue behind them.

    ``shift`` (N,) says by how many sixths of the colour circle each image's copy is turned. The crop is that of an
    evaluation, so that views differ in nothing but what is measured.
    """

    contrastive: tuple = ()
    lengths: tuple[int, ...] = (*LENGTHS, 1)
    crop: Crop = "full"
    shift: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))

    def draw(
        self, epoch: int | npt.NDArray[np.int64], index: npt.NDArray[np.int64], sizes: npt.NDArray[np.int32]
    ) -> PlannedBatch:
        drawn = super().draw(epoch, index, sizes)
        drawn.boxes[:] = CropPlan(crop=self.crop).boxes(np.asarray(sizes, np.int32))
        drawn.flips[:] = 0
        drawn.codes[:, -1], drawn.composition[-1] = END, 0
        drawn.codes[:, -1, 0] = Op.HUE
        drawn.magnitudes[:, -1, 0] = (self.shift[index] - HUES // 2) / HUES  # of the circle, -1/2 to 1/3
        return drawn


@dataclass(frozen=True)
class Invariance:
    """What an encoder keeps: R^2 of counts; accuracies and shares in [0, 1].

    ``mean_r2`` is the mean of ``r2``, over the 14 augmentations; ``unseen_r2`` that of composites of length 4 alone.
    ``same_hue``: the share of an image's 10 nearest neighbours, among the other images' shifted copies, with its shift.
    """

    name: str
    images: int
    tested: int
    r2: dict[str, float]
    mean_r2: float
    unseen_r2: float
    penalty: float
    hue: float
    turn: float
    same_hue: float
    hue_chance: float = 1 / HUES
    turn_chance: float = 1 / TURNS

    def lines(self) -> list[str]:
        """Format the report for people."""
        kept = ", ".join(f"{op} {value:.3f}" for op, value in sorted(self.r2.items(), key=lambda item: -item[1]))
        return [
            f"{self.name}: composition R^2 {self.mean_r2:.3f} (length 4: {self.unseen_r2:.3f}), hue {self.hue:.1%}, "
            f"quarter turn {self.turn:.1%}, neighbours of the same hue {self.same_hue:.1%}",
            f"  R^2 by augmentation, best kept first: {kept}",
            f"  {self.images:,} images, {self.tested:,} of them to test on; by chance 0, {self.hue_chance:.1%}, "
            f"{self.turn_chance:.1%} and {self.hue_chance:.1%}",
        ]


@dataclass(frozen=True)
class Views:
    """Features float32 of N images: plain, of L composites, of another hue, turned."""

    original: Tensor  # (N, D)
    composites: Tensor  # (L, N, D)
    composition: Tensor  # (L, N, 14)
    shifted: Features  # labels: the hue shift
    turned: Features  # labels: quarter turns


def invariance(encoder: Encoder, dataset: ImageDataset, how: Extraction, seed: int = 0) -> Invariance:
    """Measure what ``encoder`` keeps of ``dataset``'s views, which ``seed`` draws.

    Raises:
        UserError: fewer than 50 images.
    """
    if len(dataset) < LEAST_IMAGES:
        raise UserError(f"{len(dataset)} images: invariance learns from and is tested on {LEAST_IMAGES} or more")
    views, device = _features(encoder, dataset, how, seed), how.world.device
    count = len(views.original)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    parts = order.tensor_split([round(share * count) for share in _SHARES])
    r2, unseen, penalty = _composition(views, parts, device)
    hue, turn = (
        linear_probe(*(task.subset(part) for part in parts), device=device).top1
        for task in (views.shifted, views.turned)
    )
    bank, labels = views.shifted.values.to(device), views.shifted.labels
    places = nearest_neighbours(bank, bank, NEIGHBOURS, leave_one_out=True)[1].cpu()
    same = (labels[places] == labels[:, None]).double().mean().item()
    named = {op.label: value for op, value in zip(BASIC, r2.tolist(), strict=True)}
    kept = named, r2.mean().item(), unseen, penalty, hue, turn, same
    return Invariance(encoder.name, count, len(parts[2]), *kept)


@torch.no_grad()
def _features(encoder: Encoder, dataset: ImageDataset, how: Extraction, seed: int) -> Views:
    """Encode all views of the images that can be read."""
    backbone, device = encoder.backbone.to(how.world.device), how.world.device
    if device.type == "cuda":
        backbone.to(memory_format=torch.channels_last)
    generator = torch.Generator().manual_seed(seed)
    shift, turn = (torch.randperm(len(dataset), generator=generator) % classes for classes in (HUES, TURNS))
    plan = InvariancePlan(how.size, seed, crop=how.crop, filter=how.filter, shift=shift.numpy())
    order = BatchOrder(len(dataset), how.batch_size, shuffle=False, drop_last=False)
    loader = how.open_loader(dataset, plan, order, encoder.mean, encoder.std)
    found: Tensor | None = None
    composition = torch.zeros(len(LENGTHS), len(dataset), len(BASIC), dtype=torch.uint8)
    seen = torch.zeros(len(dataset), dtype=torch.bool)
    with closing(loader), closing(loader.epoch(0)) as batches, evaluating(backbone):
        for batch in track(batches, len(dataset), f"views of {encoder.name}", "images", how.batch_size):
            index = batch.index.cpu()
            pairs = zip(batch.original, turn[index].tolist(), strict=True)
            turned = torch.stack([image.rot90(turns, (1, 2)) for image, turns in pairs])
            views = [batch.original, *batch.composites, turned]
            values = torch.stack([encode(backbone, view, how).cpu() for view in views])
            if found is None:
                found = values.new_zeros(len(views), len(dataset), values.shape[2])
            found[:, index], composition[:, index], seen[index] = values, batch.composition[:-1].cpu(), True
    if found is None:
        raise UserError("a data set without images")
    original, *composites, shifted, turned = found[:, seen]
    labelled = Features(shifted, shift[seen]), Features(turned, turn[seen])
    return Views(original, torch.stack(composites), composition[:, seen], *labelled)


def _composition(views: Views, parts: Sequence[Tensor], device: torch.device) -> tuple[Tensor, float, float]:
    """Return R^2 (14,) on the last of ``parts``, its mean at length 4, and the penalty."""

    def rows(part: Tensor) -> tuple[Tensor, Tensor]:
        """Lay out features (L * n, 2 D) and counts (L * n, 14)."""
        beside = views.original[part].expand(len(LENGTHS), -1, -1)
        inputs = torch.cat([views.composites[:, part], beside], dim=2).flatten(0, 1)
        return inputs.to(device).double(), views.composition[:, part].flatten(0, 1).to(device).double()

    train, val, test = (rows(part) for part in parts)
    scores = [r_squared(val[1], ridge(*train, penalty)(val[0])).mean().item() for penalty in _RIDGE]
    penalty = _RIDGE[int(np.argmax(scores))]
    both = torch.cat([train[0], val[0]]), torch.cat([train[1], val[1]])
    truth, predicted = test[1], ridge(*both, penalty)(test[0])
    longest = r_squared(truth[-len(parts[2]) :], predicted[-len(parts[2]) :])
    return r_squared(truth, predicted), longest.mean().item(), penalty


def ridge(inputs: Tensor, targets: Tensor, penalty: float) -> Callable[[Tensor], Tensor]:
    """Fit and return a linear map with bias, ``inputs`` (N, D) -> ``targets`` (N, C).

    ``penalty`` of the squared weights is relative to the mean eigenvalue of the inputs' scatter, so that it means the
    same for every scale and number of features.
    """
    mean, level = inputs.mean(0), targets.mean(0)
    centred = inputs - mean
    scatter = centred.T @ centred
    scatter.diagonal().add_(penalty * scatter.diagonal().mean() + torch.finfo(scatter.dtype).tiny)
    weights = torch.linalg.solve(scatter, centred.T @ (targets - level))
    return lambda new: (new - mean) @ weights + level


def r_squared(truth: Tensor, predicted: Tensor) -> Tensor:
    """Return the coefficient of determination R^2 (C,); 0 for a constant column."""
    deviation = (truth - truth.mean(0)).square().sum(0)
    return torch.where(deviation > 0, 1 - (truth - predicted).square().sum(0) / deviation, 0.0)
