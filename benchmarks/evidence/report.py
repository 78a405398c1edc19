"""Report of a study: figures of each run, a table over seeds and a picture."""

import json
import math
import statistics
from collections.abc import Callable, Sequence
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

from scipy import stats

from benchmarks.common import markdown
from benchmarks.evidence.runner import Training
from cocor.metrics_file import epochs_of, lengths_of, read_run
from cocor.panels import legend, panels
from loaders.errors import UserError

NAMES = {
    "moco": "MoCo v2", "simsiam": "SimSiam", "supcon": "SupCon", "byol": "BYOL", "intl": "INTL",
    "simclr": "SimCLR", "barlow": "Barlow Twins", "vicreg": "VICReg",
}  # fmt: skip
_KEPT = {"mean_r2": "composition kept, R^2, %", "hue": "hue, %", "turn": "quarter turn, %", "same_hue": "same hue, %"}
_FEWEST = 3  # seeds of which a deviation, an interval and a p value say anything
_KINDS = ("similarity", "target")
_MOST_SIMILARITIES, _MOST_INSIDE = 6, 6  # panels of single variants; names in a legend that fits beside the curves
_BELOW: dict[str, Any] = {"ncols": 2, "loc": "upper center", "bbox_to_anchor": (0.5, -0.15)}  # the panel: a legend
_COLOURS, _STYLES = 10, ("-", "--", ":")  # of curves in one panel
Run = dict[str, Any]  # figures of a run, as the JSON file has them; curves are points over epochs
Curve = Sequence[tuple[float, float]]


def measured(training: Training) -> Run:
    """Read the figures of a finished run."""
    records, record = read_run(training.folder), training.record()
    knn = [(float(r["epoch"]), float(r["accuracy"])) for r in records if r["kind"] == "knn"]
    if not knn:
        raise UserError(f"{training.folder}: no k-NN was measured; pass held-out images with labels as --val-data")
    steps = [r for r in records if r["kind"] == "train"]
    points = list(zip(epochs_of(records), steps, strict=True))
    rates, seconds = [r["images_per_s"] for r in steps if r["images_per_s"]], seconds_of(steps)
    seconds *= int(record["flags"]["batch_size"])

    def curves(kind: str) -> dict[int, Curve]:
        names = {n: f"{kind}_{n}" for n in lengths_of(records)}
        return {n: [(at, r[key]) for at, r in points if r.get(key) is not None] for n, key in names.items()}

    run = {
        "method": training.method, "variant": training.variant.key, "title": training.variant.title,
        "seed": training.seed, "settings": record["settings"], "machine": record["machine"],
        "flags": {key: value for key, value in record["flags"].items() if key not in ("data", "val_data")}, "knn": knn,
        "similarity": curves("similarity"), "target": curves("target"), "minutes": round(seconds / 60, 2),
        "images_per_s": round(statistics.median(rates), 1) if rates else math.nan,
        "last": {key: value for key, value in (steps[-1] if steps else {}).items() if isinstance(value, float)},
    }  # fmt: skip
    results = {name: training.folder / name / f"{name}.json" for name in training.probes if name in record}
    probes = {name: json.loads(path.read_text())["result"] for name, path in results.items()}
    if "linear" in probes:
        run["linear"] = probes["linear"]["top1"]
    if "invariance" in probes:
        run["invariance"] = {key: probes["invariance"][0][key] for key in _KEPT}
    return run


def seconds_of(steps: Sequence[dict[str, Any]]) -> float:
    """Add up the seconds of training an image a step, by records of metrics.jsonl."""
    timed = [(r["step"] - before["step"], r["images_per_s"]) for before, r in pairwise([{"step": 0}, *steps])]
    return sum(count / rate for count, rate in timed if rate)


def values(of_seeds: Sequence[float], scale: float = 100.0) -> str:
    """Format what was measured: ``68.3, 68.1``; of three and more ``76.3 ± 0.4``."""
    known = [value * scale for value in of_seeds if not math.isnan(value)]
    missing = f" ({len(known)} of {len(of_seeds)})" if len(known) < len(of_seeds) else ""
    if len(known) < _FEWEST:
        return ", ".join(f"{value:.1f}" for value in known) + missing if known else "-"
    return f"{statistics.fmean(known):.1f} ± {statistics.stdev(known):.1f}{missing}"


def gain(differences: Sequence[float]) -> str:
    """Format paired differences: ``+2.8, +4.6``; three and more with interval and p.

    The interval is Student's, of 95 %, and p that of the two-sided paired t test.
    """
    percent = [100 * value for value in differences if not math.isnan(value)]
    if len(percent) < _FEWEST:
        return ", ".join(f"{value:+.1f}" for value in percent) or "-"
    test = stats.ttest_1samp(percent, 0.0)
    low, high = test.confidence_interval(0.95)
    return f"{statistics.fmean(percent):+.1f} [{low:+.1f}, {high:+.1f}], p {test.pvalue:.2g}"


def grouped(runs: Sequence[Run]) -> dict[tuple[str, str], list[Run]]:
    """Group sorted runs by method and variant, over their seeds."""
    return {key: list(group) for key, group in groupby(runs, lambda run: (run["method"], run["variant"]))}


def table(runs: Sequence[Run]) -> str:
    """Format accuracies, gains, similarities, and CoCor's share of the gradient."""
    accuracies: dict[str, Callable[[Run], float]] = {"k-NN accuracy, %": lambda run: run["knn"][-1][1]}
    if any("linear" in run for run in runs):
        accuracies["linear accuracy, %"] = lambda run: run.get("linear", math.nan)
    kept = _KEPT if any("invariance" in run for run in runs) else {}
    titles = ["method", *(title for name in accuracies for title in (name, "gain over plain")), "seeds", "epochs",
              "minutes", "images/s", "similarity / target", "gradient share", *kept.values()]  # fmt: skip
    lines, groups = [], grouped(runs)
    for (method, variant), group in groups.items():
        line = [f"{NAMES[method]} {group[0]['title']}"]
        plain = {run["seed"]: run for run in groups.get((method, "plain"), []) if variant != "plain"}
        for value in accuracies.values():
            line += [values([value(run) for run in group])]
            line += [gain([value(run) - value(plain[run["seed"]]) for run in group if run["seed"] in plain])]
        last = {(kind, n): statistics.fmean(run[kind][n][-1][1] for run in group)
                for kind in ("similarity", "target") for n in group[0][kind]}  # fmt: skip
        ends = [f"{last['similarity', n]:.2f}/{last['target', n]:.2f}" for n in sorted(group[0]["target"])]
        norms = [[run["last"].get(f"gradient_{kind}") for kind in ("consistency", "contrastive")] for run in group]
        line += [str(len(group)), "/".join(dict.fromkeys(f"{run['knn'][-1][0]:.0f}" for run in group)),
                 values([run["minutes"] for run in group], 1.0),
                 f"{statistics.fmean(run['images_per_s'] for run in group):,.0f}", " ".join(ends) or "-",
                 values([one / (one + other) for one, other in norms if None not in (one, other)])]  # fmt: skip
        line += [values([run.get("invariance", {}).get(key, math.nan) for run in group]) for key in kept]
        lines.append(line)
    return markdown(titles, lines)


def draw(runs: Sequence[Run], path: Path, clock: bool) -> None:
    """Draw k-NN over epochs, what is kept against it, and similarities against targets, with deviations."""
    groups, methods = grouped(runs), dict.fromkeys(run["method"] for run in runs)
    charts = [(method, minutes) for method in methods for minutes in (False, True)[: 1 + clock]]
    keeping = [method for method in methods if any("invariance" in run for run in runs if run["method"] == method)]
    consistent = [group for group in groups.values() if group[0]["similarity"]][:_MOST_SIMILARITIES]
    with panels(path, len(charts) + len(keeping) + len(consistent), columns=3) as axes:
        for place, (method, minutes) in zip(axes, charts, strict=False):
            chosen = [group for (other, _), group in groups.items() if other == method]
            for number, group in enumerate(chosen):
                style = _STYLES[number // _COLOURS % len(_STYLES)]
                rate = statistics.fmean(run["minutes"] / max(run["knn"][-1][0], 1) for run in group) if minutes else 1.0
                percent = [[(at * rate, 100 * value) for at, value in run["knn"]] for run in group]
                _band(place, percent, f"C{number % _COLOURS}", style, group[0]["title"])
            unit = "minutes of training" if minutes else "epoch"
            place.set(title=f"{NAMES[method]}: k-NN accuracy", xlabel=unit, ylabel="accuracy (%)")
            legend(place, **({} if len(chosen) <= _MOST_INSIDE else _BELOW))
        for place, method in zip(axes[len(charts) :], keeping, strict=False):
            _what_is_kept(place, [run for run in runs if run["method"] == method and "invariance" in run])
        for place, group in zip(axes[len(charts) + len(keeping) :], consistent, strict=True):
            for number, length in enumerate(sorted(group[0]["similarity"])):
                for kind, style, label in (("similarity", "-", f"length {length}"), ("target", "--", None)):
                    _band(place, [run[kind][length] for run in group], f"C{number}", style, label)
            title = f"{NAMES[group[0]['method']]} {group[0]['title']}: similarity, target (dashed)"
            place.set_title(title, fontsize=9)
            place.set(xlabel="epoch", ylabel="cosine similarity")
            legend(place)


def _what_is_kept(axes: Any, runs: Sequence[Run]) -> None:
    """Draw a point a run: what its features keep of the hue, and its accuracy."""
    measure = "linear" if all("linear" in run for run in runs) else "k-NN"
    for number, (title, group) in enumerate(groupby(runs, lambda run: run["title"])):
        points = [
            (100 * run["invariance"]["hue"], 100 * (run["linear"] if measure == "linear" else run["knn"][-1][1]))
            for run in group
        ]
        look = {"c": f"C{number % _COLOURS}", "marker": "os^Dv"[number // _COLOURS % 5]}
        axes.scatter(*zip(*points, strict=True), label=title, **look)
    axes.set(
        title=f"{NAMES[runs[0]['method']]}: accuracy against hue kept",
        xlabel="hue shift told from features (%)",
        ylabel=f"{measure} accuracy (%)",
    )
    legend(axes, **({} if len(axes.collections) <= _MOST_INSIDE else _BELOW))


def _band(axes: Any, curves: Sequence[Curve], colour: str, style: str, label: str | None) -> None:
    """Draw mean and deviation of curves at the points that they have in common."""
    values_at = [dict(curve) for curve in curves]
    at = sorted(set(values_at[0]).intersection(*values_at[1:]))
    columns = [[values[point] for values in values_at] for point in at]
    bands = [(statistics.fmean(c), statistics.stdev(c) if len(c) > 1 else 0.0) for c in columns]
    axes.plot(at, [mean for mean, _ in bands], style, color=colour, label=label)
    low, high = ([mean + sign * deviation for mean, deviation in bands] for sign in (-1, 1))
    axes.fill_between(at, low, high, color=colour, alpha=0.2, linewidth=0)
