"""Draw training runs side by side from their metrics.jsonl: what they learned, and whether similarities met targets.

    python benchmarks/compare_runs.py runs/moco runs/moco_cocor --output comparison.png --json comparison.json

One panel shows the k-NN accuracy of every run. Every run with a consistency loss gets a panel of its own: the mean
latent similarity of each composite length (solid) and the target that the MMNN or the constants set for it (dashed).
``--json`` keeps the numbers behind the picture: k-NN by epoch, and the last similarities and targets.
Needs matplotlib (``pip install 'cocor[plot]'``).
"""

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from cocor.log import METRICS
from loaders.errors import UserError

Record = dict[str, Any]


def read_run(folder: Path) -> list[Record]:
    """The records of a run's metrics.jsonl. UserError if there are none."""
    try:
        lines = (folder / METRICS).read_text().splitlines()
    except OSError as error:
        raise UserError(f"{folder / METRICS}: {error.strerror}; name the folder of a run") from None
    return [json.loads(line) for line in lines]


def epochs_of(records: list[Record]) -> list[float]:
    """Fractional epochs of training records, from their steps and the steps of an epoch."""
    knn = [r for r in records if r["kind"] == "knn" and r["epoch"]]
    per_epoch = knn[-1]["step"] / knn[-1]["epoch"] if knn else records[-1]["step"] / (records[-1]["epoch"] + 1)
    return [r["step"] / per_epoch for r in records if r["kind"] == "train"]


def draw_knn(axes: Axes, runs: dict[str, list[Record]]) -> None:
    for name, records in runs.items():
        knn = [(r["epoch"], 100 * r["accuracy"]) for r in records if r["kind"] == "knn"]
        if knn:
            line = axes.plot(*zip(*knn, strict=True), marker=".", label=f"{name}: {knn[-1][1]:.1f} %")[0]
            line.set_linestyle("-" if lengths_of(records) else "--")
    axes.set(title="k-NN on held-out images", xlabel="epoch", ylabel="top-1 accuracy (%)")
    axes.legend(fontsize=8)


def draw_similarities(axes: Axes, name: str, records: list[Record]) -> None:
    train = [r for r in records if r["kind"] == "train"]
    for number, length in enumerate(lengths_of(records)):
        color = f"C{number}"
        axes.plot(epochs_of(records), [r[f"similarity_{length}"] for r in train], color, label=f"length {length}")
        axes.plot(epochs_of(records), [r[f"target_{length}"] for r in train], color, linestyle="--")
    axes.set(title=name, xlabel="epoch", ylabel="latent similarity (dashed: target)")
    axes.legend(fontsize=8)


def lengths_of(records: list[Record]) -> list[int]:
    """The composite lengths that a run measured; none for a plain method."""
    keys = next((r for r in records if r["kind"] == "train"), {})
    return sorted(int(key.removeprefix("similarity_")) for key in keys if key.startswith("similarity_"))


def draw(runs: dict[str, list[Record]], output: Path) -> None:
    """Write the picture to ``output``, whose suffix chooses the format (.png, .svg)."""
    consistent = {name: records for name, records in runs.items() if lengths_of(records)}
    panels = 1 + len(consistent)
    figure, axes = plt.subplots(1, panels, figsize=(4.6 * panels, 3.8), layout="constrained", squeeze=False)
    draw_knn(axes[0, 0], runs)
    for place, (name, records) in zip(axes[0, 1:], consistent.items(), strict=True):
        draw_similarities(place, name, records)
    for place in axes[0]:
        place.grid(alpha=0.3)
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=110)


def summary(records: list[Record]) -> Record:
    """The numbers of a run that its panels show: k-NN accuracy by epoch, last similarities and targets by length."""
    last = [r for r in records if r["kind"] == "train"][-1]
    return {
        "knn_by_epoch": {r["epoch"]: round(r["accuracy"], 4) for r in records if r["kind"] == "knn"},
        "similarity": {length: round(last[f"similarity_{length}"], 4) for length in lengths_of(records)},
        "target": {length: round(last[f"target_{length}"], 4) for length in lengths_of(records)},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="folders of runs")
    parser.add_argument("--output", type=Path, default=Path("comparison.png"))
    parser.add_argument("--names", nargs="*", help="names of the runs in the picture (default: of their folders)")
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    arguments = parser.parse_args()
    names = arguments.names or [run.name for run in arguments.runs]
    try:
        runs = dict(zip(names, map(read_run, arguments.runs), strict=True))
        draw(runs, arguments.output)
        if arguments.json is not None:
            arguments.json.write_text(json.dumps({name: summary(run) for name, run in runs.items()}, indent=1) + "\n")
    except UserError as error:
        raise SystemExit(f"compare_runs: error: {error}") from None


if __name__ == "__main__":
    main()
