"""The command ``cocor-plot``: training runs side by side, from their metrics.jsonl.

    cocor-plot runs/moco runs/moco_cocor --output comparison.png --json comparison.json

Shared panels show every run: k-NN accuracy, losses, learning rate, speed and the wait for data. Every run with a
consistency loss gets a panel of its own: the mean latent similarity of each composite length (solid) and the target
that the MMNN or the constants set for it (dashed). Panels without data are left out. ``--json`` keeps the
numbers behind the picture: k-NN by epoch, and the last similarities and targets.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cocor import atomic, launch
from cocor.cli import Parser
from cocor.log import METRICS
from cocor.panels import check_picture, legend, panels, shown
from loaders.errors import UserError
from loaders.writable import check_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Record = dict[str, Any]
Runs = dict[str, list[Record]]

# Curves over training steps: name of the panel -> (key in metrics.jsonl, title, unit, factor).
_CURVES: dict[str, tuple[str, str, str, float]] = {
    "loss": ("loss", "loss (contrastive + consistency)", "loss", 1),
    "contrastive": ("contrastive_loss", "contrastive loss", "loss", 1),
    "consistency": ("consistency_loss", "consistency loss", "loss", 1),
    "lr": ("lr", "learning rate", "learning rate", 1),
    "speed": ("images_per_s", "speed", "images/s, all GPUs", 1),
    "wait": ("data_wait_share", "waiting for data", "share of the time (%)", 100),
}
PANELS = ("knn", *_CURVES, "similarity")
_COLUMNS = 3


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; the exit code."""
    given = sys.argv[1:] if arguments is None else arguments
    return launch.command("cocor-plot", lambda: _plot(_parser().parse_args(given)))


def _parser() -> argparse.ArgumentParser:
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
        atomic.write_text(options.json, json.dumps({name: summary(run) for name, run in runs.items()}, indent=1) + "\n")


def _name(run: Path) -> str:
    return run.resolve().parent.name if run.name == METRICS else run.resolve().name


# What the lines of a kind must hold as numbers; all else may be missing.
_NUMBERS = {"train": ("step", "epoch", "images_per_s"), "knn": ("step", "epoch", "accuracy")}


def read_run(path: Path) -> list[Record]:
    """The records of a run's metrics.jsonl; a last line that a running process has half written is left out.

    Raises:
        UserError: there are none.
    """
    file = path if path.name == METRICS else path / METRICS
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise UserError(f"{file}: {error.strerror}; name the folder of a run") from None
    except UnicodeDecodeError:
        raise UserError(f"{file}: not a text file; name the folder of a run") from None
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
            for key in _NUMBERS.get(record["kind"], ()):
                float(record[key])
            records.append(record)
        except (ValueError, TypeError, KeyError):
            if number < len(lines):
                raise UserError(f"{file}:{number}: not a measurement in JSON") from None
    if not any(record.get("kind") in ("train", "knn") for record in records):
        raise UserError(f"{file}: has no measurements yet")
    return records


def epochs_of(records: list[Record]) -> list[float]:
    """Fractional epochs of training records, from their steps and the steps of an epoch."""
    knn = [r for r in records if r["kind"] == "knn" and r["epoch"]]
    per_epoch = knn[-1]["step"] / knn[-1]["epoch"] if knn else records[-1]["step"] / (records[-1]["epoch"] + 1)
    return [r["step"] / per_epoch for r in records if r["kind"] == "train"]


def lengths_of(records: list[Record]) -> list[int]:
    """The composite lengths that a run measured; none for a plain method."""
    keys = {key for record in records if record["kind"] == "train" for key in record}
    return sorted(int(key.removeprefix("similarity_")) for key in keys if key.startswith("similarity_"))


def draw(runs: Runs, output: Path, wanted: Sequence[str] = PANELS) -> None:
    """Write the picture to ``output``, whose suffix chooses the format. UserError if nothing is left to draw."""
    runs = {shown(name): records for name, records in runs.items()}
    shared = [name for name in wanted if _has(name, runs)]
    consistent = [name for name, records in runs.items() if lengths_of(records)] if "similarity" in wanted else []
    count = len(shared) + len(consistent)
    if not count:
        raise UserError(f"--panels {' '.join(wanted)}: none of the runs measured that")
    with panels(output, count, _COLUMNS) as places:
        for axes, panel in zip(places, shared, strict=False):
            if panel == "knn":
                _draw_knn(axes, runs)
            else:
                _draw_curve(axes, runs, *_CURVES[panel])
        for axes, name in zip(places[len(shared) :], consistent, strict=True):
            _draw_similarities(axes, name, runs[name])


def _has(panel: str, runs: Runs) -> bool:
    if panel == "knn":
        return any(record["kind"] == "knn" for records in runs.values() for record in records)
    if panel not in _CURVES:
        return False
    key = _CURVES[panel][0]
    return any(record.get(key) is not None for records in runs.values() for record in records)


def _draw_knn(axes: "Axes", runs: Runs) -> None:
    for name, records in runs.items():
        knn = [(r["epoch"], 100 * r["accuracy"]) for r in records if r["kind"] == "knn"]
        if knn:
            line = axes.plot(*zip(*knn, strict=True), marker=".", label=f"{name}: {knn[-1][1]:.1f} %")[0]
            line.set_linestyle("-" if lengths_of(records) else "--")
    axes.set(title="k-NN on held-out images", xlabel="epoch", ylabel="top-1 accuracy (%)")
    legend(axes)


def _draw_curve(axes: "Axes", runs: Runs, key: str, title: str, unit: str, factor: float) -> None:
    for name, records in runs.items():
        train = [r for r in records if r["kind"] == "train"]
        points = [
            (e, factor * r[key]) for e, r in zip(epochs_of(records), train, strict=True) if r.get(key) is not None
        ]
        if points:
            axes.plot(*zip(*points, strict=True), "-" if lengths_of(records) else "--", label=name)
    axes.set(title=title, xlabel="epoch", ylabel=unit)
    if key in ("images_per_s", "data_wait_share", "lr"):
        axes.set_ylim(bottom=0)
    legend(axes)


def _draw_similarities(axes: "Axes", name: str, records: list[Record]) -> None:
    train = [r for r in records if r["kind"] == "train"]
    for number, length in enumerate(lengths_of(records)):
        for what, line, label in (("similarity", "-", f"length {length}"), ("target", "--", None)):
            key = f"{what}_{length}"  # not in every line if lengths take turns
            told = [(e, _number(r[key])) for e, r in zip(epochs_of(records), train, strict=True) if key in r]
            axes.plot(*zip(*told, strict=True), line, color=f"C{number}", label=label)
    axes.set(title=name, xlabel="epoch", ylabel="latent similarity (dashed: target)")
    legend(axes)


def _number(value: float | None) -> float:
    """JSON's null stands for what was not finite."""
    return float("nan") if value is None else value


def summary(records: list[Record]) -> Record:
    """The numbers of a run that its panels show: k-NN accuracy by epoch, last similarities and targets by length."""
    train = [r for r in records if r["kind"] == "train"]
    # Not every line names every length.
    last = {key: value for record in train for key, value in record.items() if value is not None}
    return {
        "knn_by_epoch": {r["epoch"]: round(r["accuracy"], 4) for r in records if r["kind"] == "knn"},
        "similarity": {n: round(last[f"similarity_{n}"], 4) for n in lengths_of(records) if f"similarity_{n}" in last},
        "target": {n: round(last[f"target_{n}"], 4) for n in lengths_of(records) if f"target_{n}" in last},
        "images_per_s": round(sum(r["images_per_s"] for r in train) / len(train), 1) if train else None,
    }


if __name__ == "__main__":
    sys.exit(main())
