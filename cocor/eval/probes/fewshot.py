"""Learn from a few images a class, in the two forms of the literature.

    n-shot    n images of every class of train + val, all of test; the linear probe over seeds (LooC's Flowers table)
    N-way     tasks of 5 classes of the test split, K images each to learn from and 16 to classify; l2-regularised
              logistic regression, one class against the rest, C = 1 (AugSelf, table 2)

The sources do not say how n-shot chooses its penalty. Here a fifth of the shots validates, so that no label besides the
n of each class is used; a single shot has none to spare and takes the middle of the grid.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cocor.eval.datasets.protocols import SHOT_SEEDS, TASKS, WAY_QUERIES, WAYS, Metric
from cocor.eval.features import Features
from cocor.eval.probes.linear import PENALTIES, linear_probe
from loaders.errors import UserError

_NEWTON_STEPS = 50
_TASKS_AT_ONCE = 200


@dataclass(frozen=True)
class ShotResult:
    """Accuracies in [0, 1] of each seed, top-1 and mean per class."""

    shots: int
    top1: tuple[float, ...]
    class_mean: tuple[float, ...]
    converged: bool

    def lines(self) -> list[str]:
        """Format the report for people."""
        parts = [f"{name} {_spread(values)}" for name, values in (("top-1", self.top1), ("per class", self.class_mean))]
        note = "" if self.converged else "; some fits did not converge"
        seeds = "1 seed: no deviation" if len(self.top1) == 1 else f"{len(self.top1)} seeds"
        return [f"{self.shots}-shot: {', '.join(parts)} ({seeds}{note})"]


def _spread(values: tuple[float, ...]) -> str:
    found = torch.tensor(values, dtype=torch.float64)
    deviation = f" +- {found.std().item():.2%}" if len(found) > 1 else ""
    return f"{found.mean().item():.2%}{deviation}"


def shots(
    pool: Features, test: Features, count: int, *, seeds: Iterable[int] = range(SHOT_SEEDS), metric: Metric = "top1",
    device: torch.device | str = "cpu",
) -> ShotResult:  # fmt: skip
    """Probe with ``count`` images of every class of ``pool``, once a seed.

    Raises:
        UserError: a class has fewer images.
    """
    pool = pool.labelled()
    held = count // 5 or (1 if count > 1 else 0)  # images a class that validate
    penalties = PENALTIES if held else PENALTIES[len(PENALTIES) // 2 :]
    results = []
    for seed in seeds:
        drawn = draw_shots(pool.labels, count, seed)  # (classes, count)
        train = pool.subset(drawn[:, held:].flatten())
        val = pool.subset(drawn[:, :held].flatten()) if held else None
        results.append(linear_probe(train, val, test, metric=metric, penalties=penalties, device=device))
    top1, class_mean = tuple(r.top1 for r in results), tuple(r.class_mean for r in results)
    return ShotResult(count, top1, class_mean, all(result.converged for result in results))


def check_shots(labels: Tensor, count: int, classes: Sequence[str] = ()) -> None:
    """Raise UserError if a class of ``labels`` has fewer than ``count`` images."""
    for label, images in zip(*(part.tolist() for part in labels[labels >= 0].unique(return_counts=True)), strict=True):
        if images < count:
            name = classes[label] if classes else f"number {label}"
            raise UserError(f"--shots {count}: class {name} has only {images} images; classify for fewer")


def draw_shots(labels: Tensor, count: int, seed: int) -> Tensor:
    """Draw places (classes, count) of random images of every class, by ``seed``."""
    check_shots(labels, count)
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for label in labels.unique().tolist():
        members = (labels == label).nonzero().flatten()
        rows.append(members[torch.randperm(len(members), generator=generator)[:count]])
    return torch.stack(rows)


def check_ways(labels: Tensor, shots: int, ways: int) -> None:
    """Raise UserError if too few classes of ``labels`` have over ``shots`` images."""
    enough = int((labels[labels >= 0].unique(return_counts=True)[1] > shots).sum())
    if enough < ways:
        reason = f"only {enough} classes of the test images have more than {shots}"
        raise UserError(f"--ways {ways}: {reason}; --tasks 0 leaves tasks out")


@dataclass(frozen=True)
class TaskResult:
    """Mean accuracy over tasks in [0, 1] and half the width of its 95 % interval."""

    ways: int
    shots: int
    queries: int
    tasks: int
    accuracy: float
    interval: float

    def lines(self) -> list[str]:
        """Format the report for people."""
        share = f"{self.accuracy:.2%} +- {self.interval:.2%} (95 %)"
        return [f"{self.ways}-way {self.shots}-shot: {share}, {self.tasks:,} tasks, {self.queries} queries a class"]


def episodes(
    features: Features, shots: int, *, ways: int = WAYS, tasks: int = TASKS, device: torch.device | str = "cpu"
) -> TaskResult:
    """Classify in drawn tasks of ``ways`` classes from ``shots`` images each.

    A class with too few images for all queries repeats some, one with ``shots`` or fewer is left out, as in the source.
    UserError if fewer than ``ways`` classes remain.
    """
    features = features.labelled()
    members = [(features.labels == label).nonzero().flatten() for label in features.labels.unique()]
    members = [places for places in members if len(places) > shots]
    check_ways(features.labels, shots, ways)
    values = features.values if features.values.ndim == 2 else features.values[:, 4]
    values = values.to(device, torch.float64)
    generator = torch.Generator().manual_seed(0)
    accuracies = []
    for start in range(0, tasks, _TASKS_AT_ONCE):
        count = min(_TASKS_AT_ONCE, tasks - start)
        drawn = torch.stack([_task(members, ways, shots, generator) for _ in range(count)]).to(device)
        accuracies.append(_solve(values, drawn[..., :shots], drawn[..., shots:]).cpu())
    found = torch.cat(accuracies)
    interval = 1.96 * found.std(correction=0).item() / len(found) ** 0.5
    return TaskResult(ways, shots, WAY_QUERIES, tasks, found.mean().item(), interval)


def _task(members: list[Tensor], ways: int, shots: int, generator: torch.Generator) -> Tensor:
    """Draw places (ways, shots + queries)."""
    rows = []
    for label in torch.randperm(len(members), generator=generator)[:ways].tolist():
        places = members[label][torch.randperm(len(members[label]), generator=generator)]
        rest = places[shots : shots + WAY_QUERIES]
        if len(rest) < WAY_QUERIES:
            rest = places[shots:][torch.randint(len(places) - shots, (WAY_QUERIES,), generator=generator)]
        rows.append(torch.cat([places[:shots], rest]))
    return torch.stack(rows)


def _solve(values: Tensor, support: Tensor, queries: Tensor) -> Tensor:
    """Return accuracies (T,) of T tasks: places (T, ways, shots) to learn from, (T, ways, queries) to classify."""
    ways, shots = support.shape[1:]
    learn = values[support.flatten(1)]  # (T, n, D)
    classify = values[queries.flatten(1)]
    kernel = learn @ learn.transpose(1, 2) + 1  # the 1: a bias, penalised as liblinear does
    owner = torch.arange(ways, device=values.device).repeat_interleave(shots)
    signs = torch.where(owner == torch.arange(ways, device=values.device)[:, None], 1.0, -1.0).double()  # (ways, n)
    weights = logistic_regression(kernel[:, None], signs)  # (T, ways, n)
    scores = (classify @ learn.transpose(1, 2) + 1) @ weights.transpose(1, 2)  # (T, ways * queries, ways)
    truth = torch.arange(ways, device=values.device).repeat_interleave(queries.shape[-1])
    return (scores.argmax(2) == truth).double().mean(1)


def logistic_regression(kernel: Tensor, signs: Tensor) -> Tensor:
    """Solve many small logistic regressions by Newton's method, with C = 1.

    Each minimises ``|w|^2 / 2 + sum_i log(1 + exp(-s_i w.x_i))``. The solution is ``w = sum_i a_i x_i`` with ``a_i =
    s_i sigmoid(-s_i (K a)_i)``, found with halved steps for the gradient in ``a``. ``kernel`` (..., n, n), ``signs``
    (..., n) -> a (..., n).
    """
    kernel, signs = kernel.double(), signs.double()
    identity = torch.eye(kernel.shape[-1], dtype=torch.float64, device=kernel.device)
    weights = kernel.new_zeros(torch.broadcast_shapes(kernel.shape[:-1], signs.shape))

    def objective(a: Tensor) -> Tensor:
        margin = (kernel @ a[..., None])[..., 0]
        return 0.5 * (a * margin).sum(-1) + torch.nn.functional.softplus(-signs * margin).sum(-1)

    value = objective(weights)
    for _ in range(_NEWTON_STEPS):
        margin = (kernel @ weights[..., None])[..., 0]
        miss = torch.sigmoid(-signs * margin)
        residual = weights - signs * miss
        if residual.abs().max() < 1e-9:
            break
        slope = identity + (miss * (1 - miss))[..., None] * kernel
        move = torch.linalg.solve(slope, residual[..., None])[..., 0]
        size = torch.ones_like(value)
        for _ in range(30):  # halve the steps that do not descend
            new = objective(weights - size[..., None] * move)
            worse = new > value + 1e-12 * value.abs()
            if not worse.any():
                break
            size = torch.where(worse, size / 2, size)
        weights = weights - size[..., None] * move
        value = objective(weights)
    return weights
