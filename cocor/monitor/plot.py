"""Run ``cocor-plot``: draw training runs side by side, from their metrics.jsonl.

    cocor-plot runs/moco runs/moco_cocor --output comparison.png --json comparison.json

Shared panels show every run, in the same colour: accuracies, losses, learning rate, speed and the wait for data.
Every run with a consistency loss gets a panel of its own: the mean latent similarity of each composite length (solid)
and the target that the MMNN or the constants set for it (dashed). A run whose MMNN learns also shows what it learns
from, the inner product <grad CE, grad similarity> of each length: its mean over its deviation within the interval of
the log (solid), and the share of steps in which it is above 0 (dashed). Panels without data are left out. ``--json``
keeps the numbers behind the picture: accuracies by epoch, and the last similarities and targets.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from math import nan
from pathlib import Path
from typing import TYPE_CHECKING

from cocor import cli
from cocor.metrics_file import Record, epochs_of, lengths_of, read_run
from cocor.panels import check_picture, end_at_100, legend, panels, shown
from cocor.run_dir import METRICS
from loaders.arguments import Parser
from loaders.errors import UserError
from loaders.files import check_file, write_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Runs = dict[str, list[Record]]

# Curves over training steps: name of the panel -> (key in metrics.jsonl, title, unit, factor).
_CURVES: dict[str, tuple[str, str, str, float]] = {
    "loss": ("loss", "loss (contrastive + consistency)", "loss", 1),
    "contrastive": ("contrastive_loss", "contrastive loss", "loss", 1),
    "consistency": ("consistency_loss", "consistency loss", "loss", 1),
    "auxiliary": ("auxiliary_loss", "auxiliary loss", "loss", 1),
    "lr": ("lr", "learning rate", "learning rate", 1),
    "speed": ("images_per_s", "speed", "images/s, all GPUs", 1),
    "wait": ("data_wait_share", "waiting for data", "share of the time (%)", 100),
}
# Panels of their own for every run that has the values: name of the panel -> first part of the key.
_BY_LENGTH = {"similarity": "similarity", "products": "product"}
_ACCURACIES = {"knn": "k-NN on held-out images", "probe": "linear probe on held-out images"}
PANELS = (*_ACCURACIES, *_CURVES, *_BY_LENGTH)
_COLUMNS = 3


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Returns the exit code."""
    given = sys.argv[1:] if arguments is None else arguments
    return cli.command("cocor-plot", lambda: _plot(_parser().parse_all(given)))


def _parser() -> Parser:
    parser = Parser("cocor-plot", description="Compare training runs in a picture.", allow_abbrev=False)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folders of runs, or metrics.jsonl files")
    parser.add_argument("--output", type=Path, default=Path("comparison.png"), help="a .png, .svg or .pdf file")
    parser.add_argument("--names", nargs="+", help="names of the runs in the picture (default: of their folders)")
    parser.add_argument("--panels", nargs="+", choices=PANELS, default=list(PANELS), help="what to draw (default: all)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the numbers here")
    return parser


def _plot(options: argparse.Namespace) -> None:
    names = options.names or [_name(run) for run in options.runs]
    if len(names) != len(options.runs):
        raise UserError(f"--names: {len(names)} names for {len(options.runs)} runs")
    if len(set(names)) < len(names):
        raise UserError("two runs have the same name; give each its own with --names")
    check_picture(options.output)
    check_file("--output", options.output)
    if options.json is not None:
        check_file("--json", options.json)
    runs = dict(zip(names, map(read_run, options.runs), strict=True))
    draw(runs, options.output, options.panels)
    print(f"picture: {options.output}")
    if options.json is not None:
        write_text(options.json, json.dumps({name: summary(run) for name, run in runs.items()}, indent=1) + "\n")


def _name(run: Path) -> str:
    return run.resolve().parent.name if run.name == METRICS else run.resolve().name


def draw(runs: Runs, output: Path, wanted: Sequence[str] = PANELS) -> None:
    """Draw the picture ``output``. UserError if nothing is left to draw."""
    runs = {shown(name): records for name, records in runs.items()}
    shared = [name for name in wanted if _has(name, runs)]
    own = [
        (panel, name)
        for panel, key in _BY_LENGTH.items()
        for name, records in runs.items()
        if panel in wanted and lengths_of(records, key)
    ]
    count = len(shared) + len(own)
    if not count:
        raise UserError(f"--panels {' '.join(wanted)}: none of the runs measured that")
    named: set[str] = set()
    with panels(output, count, _COLUMNS) as places:
        for axes, panel in zip(places, shared, strict=False):
            if panel in _ACCURACIES:
                _draw_accuracies(axes, runs, panel)
            else:
                _draw_curve(axes, runs, *_CURVES[panel])
            names = set(axes.get_legend_handles_labels()[1])
            if names - named:  # a legend in every panel would hide curves, whose colours are the same in all of them
                legend(axes)
            named |= names
        for axes, (panel, name) in zip(places[len(shared) :], own, strict=True):
            (_draw_similarities if panel == "similarity" else _draw_products)(axes, name, runs[name])


def _has(panel: str, runs: Runs) -> bool:
    found = [record for records in runs.values() for record in records]
    if panel in _ACCURACIES:
        return any(record["kind"] == panel for record in found)
    return panel in _CURVES and any(record.get(_CURVES[panel][0]) is not None for record in found)


def _draw_accuracies(axes: "Axes", runs: Runs, kind: str) -> None:
    for number, (name, records) in enumerate(runs.items()):
        points = [(r["epoch"], 100 * r["accuracy"]) for r in records if r["kind"] == kind]
        if points:
            label, line = f"{name}: {points[-1][1]:.1f} %", _line(records)
            axes.plot(*zip(*points, strict=True), line, color=f"C{number}", marker=".", label=label)
    axes.set(title=_ACCURACIES[kind], xlabel="epoch", ylabel="top-1 accuracy (%)")
    end_at_100(axes)


def _draw_curve(axes: "Axes", runs: Runs, key: str, title: str, unit: str, factor: float) -> None:
    for number, (name, records) in enumerate(runs.items()):  # a run has one colour in all panels
        epochs, values = _curve(records, key)
        if values:
            line = _line(records) if len(values) > 1 else "."  # which a single value has none of
            axes.plot(epochs, [factor * v for v in values], line, color=f"C{number}", label=name)
    axes.set(title=title, xlabel="epoch", ylabel=unit)
    if key in ("images_per_s", "data_wait_share", "lr"):
        axes.set_ylim(bottom=0)


def _draw_similarities(axes: "Axes", name: str, records: list[Record]) -> None:
    for number, length in enumerate(lengths_of(records)):
        for what, line, label in (("similarity", "-", f"length {length}"), ("target", "--", None)):
            epochs, values = _curve(records, f"{what}_{length}")
            if values:
                axes.plot(epochs, values, line if len(values) > 1 else ".", color=f"C{number}", label=label)
    axes.set(title=name, xlabel="epoch", ylabel="latent similarity (dashed: target)")
    legend(axes)


def _draw_products(axes: "Axes", name: str, records: list[Record]) -> None:
    for number, length in enumerate(lengths_of(records, "product")):
        epochs, means = _curve(records, f"product_{length}")
        _, deviations = _curve(records, f"product_deviation_{length}")
        _, shares = _curve(records, f"product_positive_{length}")
        ratios = [mean / deviation if deviation else nan for mean, deviation in zip(means, deviations, strict=False)]
        axes.plot(epochs[: len(ratios)], ratios, color=f"C{number}", label=f"length {length}")
        axes.plot(epochs[: len(shares)], shares, "--", color=f"C{number}")
    label = "<grad CE, grad similarity>:\nmean / deviation (dashed: share above 0)"
    axes.set(title=name, xlabel="epoch", ylabel=label)
    legend(axes)


def _line(records: list[Record]) -> str:
    """Return a line: solid for a run with a consistency loss, dashed for a plain one."""
    return "-" if lengths_of(records) else "--"


def _curve(records: list[Record], key: str) -> tuple[list[float], list[float]]:
    """Collect epochs and values of the training records that have ``key``; empty if no value is a number.

    With ``--lengths-per-step`` not all records have all lengths. A null was not finite, and breaks the curve.
    """
    train = [r for r in records if r["kind"] == "train"]
    points = [(epoch, r[key]) for epoch, r in zip(epochs_of(records), train, strict=True) if key in r]
    if all(value is None for _, value in points):
        return [], []
    return [epoch for epoch, _ in points], [float("nan") if value is None else value for _, value in points]


def summary(records: list[Record]) -> Record:
    """Summarise a run: accuracies by epoch, last similarities and targets, mean speed."""
    train = [r for r in records if r["kind"] == "train"]
    last = {key: value for record in train for key, value in record.items() if value is not None}  # of each length
    speeds = [r["images_per_s"] for r in train if r["images_per_s"] is not None]
    named = {what: {n: round(last[f"{what}_{n}"], 4) for n in lengths_of(records) if f"{what}_{n}" in last}
             for what in ("similarity", "target")}  # fmt: skip
    by_epoch = {
        f"{kind}_by_epoch": {r["epoch"]: round(r["accuracy"], 4) for r in records if r["kind"] == kind}
        for kind in _ACCURACIES
    }
    speed = round(sum(speeds) / len(speeds), 1) if speeds else None
    return {**by_epoch, **named, "images_per_s": speed}


if __name__ == "__main__":
    sys.exit(main())
