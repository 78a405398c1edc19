"""Run the linear probe of the paper's tables: softmax regression, to convergence.

    train, val -> 45 penalties, warm-started from strong to weak -> the best on val -> refit on both -> test, once

Protocol of AugSelf's transfer evaluation, which follows Kornblith et al. 2019. One thing is added: features are divided
by the root mean square of the training features; otherwise the grid would not suit an encoder with larger ones.
"""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from cocor.eval.datasets.protocols import GRID, Metric
from cocor.eval.features import Features, joined
from cocor.eval.probes.softmax_regression import Fit, SoftmaxRegression
from loaders.errors import UserError

PENALTIES: tuple[float, ...] = tuple(torch.logspace(*GRID, dtype=torch.float64).tolist())
_SEARCH_TOLERANCE = 1e-5  # of the gradient, while choosing; the refit goes ten times further
_ROWS = 65536  # summed at a time
_MOST_DOUBLES = 2**28  # feature values that are solved in float64; more of them in float32


@dataclass(frozen=True)
class Trial:
    """Penalty of the grid, its accuracies in [0, 1] on val, and how its fit ended."""

    penalty: float
    top1: float
    class_mean: float
    iterations: int
    converged: bool


@dataclass(frozen=True)
class LinearResult:
    """Test accuracies in [0, 1] with the ``penalty`` that ``metric`` chose on val.

    ``predicted`` int64 (N,): the classes of the labelled test images. ``converged`` and ``loss``, the objective, are
    the refit's.
    """

    top1: float
    class_mean: float
    metric: Metric
    penalty: float
    converged: bool
    gradient: float
    loss: float
    seconds: float
    train: int
    val: int
    test: int
    classes: int
    trials: tuple[Trial, ...]
    predicted: Tensor

    @property
    def accuracy(self) -> float:
        """Choose the accuracy in the metric of the protocol."""
        return self.top1 if self.metric == "top1" else self.class_mean

    def plain(self) -> dict[str, Any]:
        """Convert to what JSON holds: everything but the single predictions."""
        return asdict(replace(self, predicted=torch.empty(0))) | {"predicted": None}

    def lines(self) -> list[str]:
        """Format the report for people."""
        mark = {"top1": "top-1", "class-mean": "mean per class"}[self.metric]
        limit = [trial.penalty for trial in self.trials if not trial.converged]
        ends = {trial.penalty for trial in (*self.trials[:1], *self.trials[-1:])}
        edge = " (an end of the grid)" if self.penalty in ends else ""
        fit = "converged" if self.converged else "NOT converged: raise --iterations"
        ended = "all fits of the grid converged"
        if limit:
            span = f"penalties {min(limit):.2g} to {max(limit):.2g}"
            ended = f"{len(limit)} fits of the grid stopped unfinished at the iteration limit, {span}"
        return [
            f"top-1 {self.top1:.2%}, mean per class {self.class_mean:.2%} (the protocol's choice: {mark})",
            f"{self.train:,} + {self.val:,} images to learn from, {self.test:,} to test on, {self.classes} classes",
            f"penalty {self.penalty:.3g} of {len(self.trials)} tried{edge}; refit {fit}, "
            f"relative gradient {self.gradient:.1e}; {self.seconds:.1f} s",
            ended,
        ]


def top1(predicted: Tensor, labels: Tensor) -> float:
    """Return the share of right predictions."""
    return (predicted == labels).double().mean().item()


def class_mean(predicted: Tensor, labels: Tensor) -> float:
    """Average over the classes in ``labels`` the share of right predictions."""
    present, place = labels.unique(return_inverse=True)
    right = torch.zeros(len(present), dtype=torch.float64).index_add_(0, place, (predicted == labels).double())
    return (right / place.bincount(minlength=len(present))).mean().item()


def linear_probe(
    train: Features, val: Features | None, test: Features, *, metric: Metric = "top1",
    penalties: Sequence[float] = PENALTIES, iterations: int = 1000, device: torch.device | str = "cpu",
) -> LinearResult:  # fmt: skip
    """Choose the penalty, refit and test; ten crops are ten samples an image.

    Without ``val`` nothing is chosen: ``penalties`` is the one to use.

    Raises:
        UserError: fewer than two classes, an empty split, or labels of the test split alone.
    """
    began = time.perf_counter()
    train, test = train.labelled().flat(), test.labelled()
    val = None if val is None else val.labelled()
    classes = check_splits(train.labels, (train if val is None else val).labels, test.labels)
    dtype = torch.float64 if train.values.numel() <= _MOST_DOUBLES else torch.float32
    squares = sum(part.double().square().sum().item() for part in train.values.split(_ROWS))
    scale = 1 / max((squares / train.values.numel()) ** 0.5, 1e-30)

    def place(features: Features) -> Tensor:
        values = features.values if features.values.ndim == 2 else features.values[:, 4]  # the central crop of ten
        return values.to(device).to(dtype) * scale  # converted on the device

    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        problem = SoftmaxRegression(place(train), train.labels, classes)
        trials: list[Trial] = []
        penalty, start, everything = penalties[0], None, train
        if val is not None:
            trials, start = _search(problem, place(val), val.labels, penalties, metric, iterations)
            penalty, everything = _best(trials, metric).penalty, joined(train, val.flat())
            del problem  # two copies of all features would not always fit
            problem = SoftmaxRegression(place(everything), everything.labels, classes)
        fit = problem.fit(penalty, start, iterations=iterations)
        predicted = _predict(place(test), fit)
    finally:
        torch.set_float32_matmul_precision(precision)
    scores = top1(predicted, test.labels), class_mean(predicted, test.labels)
    counts = len(train), 0 if val is None else len(val), len(test), classes
    ends, seconds = (fit.gradient, fit.loss), time.perf_counter() - began
    return LinearResult(*scores, metric, penalty, fit.converged, *ends, seconds, *counts, tuple(trials), predicted)


def _search(
    problem: SoftmaxRegression, val: Tensor, labels: Tensor, penalties: Sequence[float], metric: Metric, iterations: int
) -> tuple[list[Trial], Tensor]:
    """Return all trials in the order of ``penalties``, and the best one's weights."""
    fits = problem.fit_all(penalties, iterations=iterations, tolerance=_SEARCH_TOLERANCE)
    trials = []
    for penalty, fit in zip(penalties, fits, strict=True):
        predicted = _predict(val, fit)
        scores = top1(predicted, labels), class_mean(predicted, labels)
        trials.append(Trial(penalty, *scores, fit.iterations, fit.converged))
    return trials, fits[trials.index(_best(trials, metric))].weights


def _best(trials: list[Trial], metric: Metric) -> Trial:
    """Return the first of the best, as in the sources."""
    return max(trials, key=lambda trial: trial.top1 if metric == "top1" else trial.class_mean)


def _predict(inputs: Tensor, fit: Fit) -> Tensor:
    return (inputs @ fit.weights[:-1] + fit.weights[-1]).argmax(1).cpu()


def check_splits(train: Tensor, val: Tensor, test: Tensor) -> int:
    """Count the classes in the labels. UserError if no probe can use the splits."""
    train, val, test = (labels[labels >= 0] for labels in (train, val, test))
    for name, labels in (("training", train), ("validation", val), ("test", test)):
        if not len(labels):
            raise UserError(f"the {name} split has no labelled images; check the folder")
    if len(train.unique()) < 2:
        raise UserError("all training images are of 1 class; a probe needs two or more class folders")
    classes = int(max(train.max(), val.max())) + 1
    if int(test.max()) >= classes:
        raise UserError(f"the test split has a class (number {int(test.max())}) that the training split does not have")
    return classes
