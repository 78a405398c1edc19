"""What the runs of a study measured: figures of each run, means and deviations over seeds, a table and a picture."""

import json
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cocor.monitor.metrics_file import epochs_of, lengths_of, read_run
from cocor.panels import legend, panels
from common import markdown
from evidence_runs import Training
from loaders.errors import UserError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NAMES = {"moco": "MoCo v2", "simsiam": "SimSiam", "supcon": "SupCon", "byol": "BYOL", "intl": "INTL"}
_MOST_SIMILARITIES = 6  # panels of single variants
_COLOURS, _STYLES = 10, ("-", "--", ":")  # of curves in one panel
_MOST_INSIDE = 6  # names in a legend that fits beside the curves
Curve = list[tuple[float, float]]


@dataclass(frozen=True)
class Measured:
    """A run. ``knn``, ``similarity`` and ``target`` are curves over epochs; ``minutes`` is the time spent training."""

    training: Training
    knn: Curve
    similarity: dict[int, Curve]
    target: dict[int, Curve]
    images_per_s: float
    minutes: float
    last: dict[str, float]  # the last training record
    linear: float | None = None  # test accuracy of the linear probe, if there was one

    @property
    def accuracy(self) -> float:
        return self.knn[-1][1] if self.knn else math.nan

    @property
    def epochs(self) -> int:
        return round(self.knn[-1][0]) if self.knn else 0

    def to_dict(self) -> dict[str, Any]:
        return {
            "method": self.training.method,
            "variant": self.training.variant,
            "seed": self.training.seed,
            "flags": {key: str(value) for key, value in self.training.flags.items() if key not in ("data", "val_data")},
            "settings": self.training.settings,
            "knn": self.knn,
            "similarity": self.similarity,
            "target": self.target,
            "images_per_s": round(self.images_per_s, 1),
            "minutes": round(self.minutes, 2),
            "last": self.last,
            **({} if self.linear is None else {"linear": self.linear}),
        }


def measured(training: Training) -> Measured:
    """Read a run's metrics."""
    records = read_run(training.folder)
    if not any(record["kind"] == "knn" for record in records):
        raise UserError(f"{training.folder}: no k-NN was measured; pass held-out images with labels as --val-data")
    steps = [record for record in records if record["kind"] == "train"]
    epochs = epochs_of(records)
    knn = [(float(r["epoch"]), float(r["accuracy"])) for r in records if r["kind"] == "knn"]

    def curve(key: str) -> Curve:
        return [(at, float(r[key])) for at, r in zip(epochs, steps, strict=True) if r.get(key) is not None]

    lengths = lengths_of(records)
    rates = [float(r["images_per_s"]) for r in steps if r.get("images_per_s")]
    seconds, before = 0.0, 0
    for record in steps:
        if record.get("images_per_s"):
            seconds += (record["step"] - before) * int(training.flags["batch_size"]) / record["images_per_s"]
        before = record["step"]
    last = {key: value for key, value in (steps[-1] if steps else {}).items() if isinstance(value, float)}
    probe = None if training.linear is None else json.loads(training.result.read_text())["result"]["top1"]
    return Measured(
        training,
        knn,
        {length: curve(f"similarity_{length}") for length in lengths},
        {length: curve(f"target_{length}") for length in lengths},
        statistics.median(rates) if rates else math.nan,
        seconds / 60,
        last,
        probe,
    )


@dataclass(frozen=True)
class Row:
    """A variant of a method over its seeds."""

    method: str
    variant: str
    title: str
    runs: list[Measured]


def by_knn(run: Measured) -> float:
    return run.accuracy


def by_linear(run: Measured) -> float:
    return math.nan if run.linear is None else run.linear


def gains(row: Row, plain: Row | None, value: Callable[[Measured], float] = by_knn) -> list[float]:
    """By how much each run is better than that of ``plain`` with the same seed."""
    if plain is None or plain is row:
        return []
    other = {run.training.seed: value(run) for run in plain.runs}
    return [value(run) - other[run.training.seed] for run in row.runs if run.training.seed in other]


def spread(values: Sequence[float], scale: float = 100.0, sign: str = "") -> str:
    """Mean and standard deviation as text, ``76.3 ± 0.4``; a single value has no deviation. NaN stands for what was not
    measured: only the others count, and the text says how many they are."""
    known = [value * scale for value in values if not math.isnan(value)]
    if not known:
        return "-"
    deviation = f" ± {statistics.stdev(known):.1f}" if len(known) > 1 else ""
    missing = f" ({len(known)} of {len(values)})" if len(known) < len(values) else ""
    return f"{statistics.fmean(known):{sign}.1f}{deviation}{missing}"


def table(rows: Sequence[Row]) -> str:
    """Accuracies of k-NN, and of the linear probe if there was one, with their deviations over seeds, gains over the
    plain method, similarities against targets, and the share of the consistency loss in the gradient."""
    accuracies = {"k-NN accuracy, %": by_knn}
    if any(run.linear is not None for row in rows for run in row.runs):
        accuracies["linear accuracy, %"] = by_linear
    titles = [
        "method",
        *(title for name in accuracies for title in (name, "gain over plain")),
        "seeds",
        "epochs",
        "minutes",
        "images/s",
        "similarity / target",
        "gradient share",
    ]
    lines = []
    for row in rows:
        plain = next((other for other in rows if other.method == row.method and other.variant == "plain"), None)
        lines.append(
            [
                f"{NAMES[row.method]} {row.title}",
                *(
                    cell
                    for value in accuracies.values()
                    for cell in (spread([value(run) for run in row.runs]), spread(gains(row, plain, value), sign="+"))
                ),
                str(len(row.runs)),
                "/".join(dict.fromkeys(str(run.epochs) for run in row.runs)),
                spread([run.minutes for run in row.runs], 1.0),
                f"{statistics.fmean(run.images_per_s for run in row.runs):,.0f}",
                _similarities(row.runs),
                _share(row.runs),
            ]
        )
    return markdown(titles, lines)


def _share(runs: Sequence[Measured]) -> str:
    """The consistency loss' share of the sum of both gradients' norms, at the end, in percent."""
    pairs = [(run.last.get("gradient_consistency"), run.last.get("gradient_contrastive")) for run in runs]
    return spread([one / (one + other) for one, other in pairs if one is not None and other is not None])


def _similarities(runs: Sequence[Measured]) -> str:
    """Similarity and target of each length at the end, means over seeds: ``0.81/0.80 0.74/0.75 0.66/0.65``."""

    def last(curves: list[dict[int, Curve]], length: int) -> float:
        return statistics.fmean(curve[length][-1][1] for curve in curves)

    lengths = sorted(runs[0].similarity)
    pairs = (
        (last([run.similarity for run in runs], length), last([run.target for run in runs], length))
        for length in lengths
    )
    return " ".join(f"{similarity:.2f}/{target:.2f}" for similarity, target in pairs) or "-"


def draw(rows: Sequence[Row], path: Path, clock: bool) -> None:
    """k-NN over epochs (with ``clock`` also over minutes) of each method, with a band of one standard deviation over
    seeds; then similarity (solid) and target (dashed) of each length, for the first variants that have them."""
    methods = list(dict.fromkeys(row.method for row in rows))
    consistent = [row for row in rows if row.runs[0].similarity][:_MOST_SIMILARITIES]
    per_method = 2 if clock else 1
    with panels(path, per_method * len(methods) + len(consistent), columns=3) as axes:
        places = iter(axes)
        for method in methods:
            chosen = [row for row in rows if row.method == method]
            _accuracies(next(places), method, chosen, minutes=False)
            if clock:
                _accuracies(next(places), method, chosen, minutes=True)
        for row, place in zip(consistent, places, strict=True):
            _consistency(place, row)


def _accuracies(axes: "Axes", method: str, rows: Sequence[Row], *, minutes: bool) -> None:
    for number, row in enumerate(rows):
        at, mean, deviation = _band([run.knn for run in row.runs])
        if minutes and row.runs[0].epochs:
            rate = statistics.fmean(run.minutes / max(run.epochs, 1) for run in row.runs)
            at = [epoch * rate for epoch in at]
        percent = [100 * value for value in mean]
        style = _STYLES[number // _COLOURS % len(_STYLES)]
        (line,) = axes.plot(at, percent, style, color=f"C{number % _COLOURS}", label=row.title)
        low = [100 * (value - error) for value, error in zip(mean, deviation, strict=True)]
        high = [100 * (value + error) for value, error in zip(mean, deviation, strict=True)]
        axes.fill_between(at, low, high, color=line.get_color(), alpha=0.2, linewidth=0)
    axes.set_title(f"{NAMES[method]}: k-NN accuracy")
    axes.set_xlabel("minutes of training" if minutes else "epoch")
    axes.set_ylabel("accuracy (%)")
    if len(rows) <= _MOST_INSIDE:
        legend(axes)
    else:
        legend(axes, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.15))


def _consistency(axes: "Axes", row: Row) -> None:
    for number, length in enumerate(sorted(row.runs[0].similarity)):
        colour = f"C{number}"
        for curves, style, label in (
            ([run.similarity[length] for run in row.runs], "-", f"length {length}"),
            ([run.target[length] for run in row.runs], "--", None),
        ):
            at, mean, deviation = _band(curves)
            axes.plot(at, mean, style, color=colour, label=label)
            low, high = ([m + sign * d for m, d in zip(mean, deviation, strict=True)] for sign in (-1, 1))
            axes.fill_between(at, low, high, color=colour, alpha=0.15, linewidth=0)
    axes.set_title(f"{NAMES[row.method]} {row.title}: similarity, target (dashed)", fontsize=9)
    axes.set_xlabel("epoch")
    axes.set_ylabel("cosine similarity")
    legend(axes)


def _band(curves: Sequence[Curve]) -> tuple[list[float], list[float], list[float]]:
    """Epochs that all curves have in common, and the curves' means and standard deviations there."""
    values_at = [dict(curve) for curve in curves]
    epochs = sorted(set(values_at[0]).intersection(*values_at[1:]))
    columns = [[values[epoch] for values in values_at] for epoch in epochs]
    means = [statistics.fmean(column) for column in columns]
    return epochs, means, [statistics.stdev(column) if len(column) > 1 else 0.0 for column in columns]
