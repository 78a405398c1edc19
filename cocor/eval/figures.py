"""Draw the pictures of an evaluation, in the style of :mod:`cocor.panels`.

matplotlib is optional: without it a command still reports its numbers and says what is missing (see :func:`drawn`).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from statistics import mean, stdev
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from cocor.eval.probes.consistency import Consistency
from cocor.eval.probes.fewshot import ShotResult
from cocor.eval.probes.invariance import Invariance
from cocor.eval.probes.linear import Trial
from cocor.eval.probes.spectrum import Spectrum
from cocor.panels import WIDTH, end_at_100, legend, legend_text, panels, shown
from loaders.errors import UserError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.container import BarContainer


@contextmanager
def _frame(path: Path, title: str, xlabel: str, ylabel: str, **options: Any) -> Iterator["Axes"]:
    """Draw a picture of one panel, whose legend and words are set when the block ends."""
    with panels(path, 1, **options) as (axes,):
        yield axes
        axes.set(title=shown(title), xlabel=xlabel, ylabel=ylabel)
        legend(axes, **({"loc": "upper left"} if options else {}))


def draw_grid(path: Path, title: str, trials: Sequence[Trial], chosen: float) -> None:
    """Draw validation accuracy over the penalties of a linear probe."""
    penalties, rows = [trial.penalty for trial in trials], [(trial.top1, trial.class_mean) for trial in trials]
    with _frame(path, title, "l2 penalty w", "validation accuracy (%)") as axes:
        for label, curve in _distinct(*([100 * value for value in row] for row in zip(*rows, strict=True))).items():
            axes.semilogx(penalties, curve, marker=".", label=label)
        stopped = [(trial.penalty, 100 * trial.top1) for trial in trials if not trial.converged]
        if stopped:
            hollow = {"color": "C0", "markerfacecolor": "white", "label": "stopped at the limit"}
            axes.semilogx(*zip(*stopped, strict=True), "o", **hollow)
        axes.axvline(chosen, color="grey", linestyle="--", label=f"chosen: {chosen:.2g}")
        end_at_100(axes)


def draw_curve(path: Path, title: str, xlabel: str, curves: dict[str, dict[int, float]]) -> None:
    """Draw accuracies in [0, 1] over small whole numbers, such as neighbours or shots."""
    with _frame(path, title, xlabel, "accuracy (%)") as axes:
        for name, curve in curves.items():
            axes.plot(list(curve), [100 * value for value in curve.values()], marker="o", label=shown(name))
        axes.set_xscale("log")
        ticks = sorted({key for curve in curves.values() for key in curve})
        close = any(after < 1.6 * tick for tick, after in pairwise(ticks))
        axes.set_xticks(ticks, [str(tick) for tick in ticks], rotation=60 if close else 0)
        axes.minorticks_off()
        end_at_100(axes)


def draw_shots(path: Path, title: str, found: Sequence[ShotResult]) -> None:
    """Draw accuracy over images a class, mean and standard deviation over the draws."""
    counts = [result.shots for result in found]
    with _frame(path, title, "images a class", "accuracy (%), mean and deviation") as axes:
        rows = [[[100 * value for value in row] for row in part]
                for part in ([r.top1 for r in found], [r.class_mean for r in found])]  # fmt: skip
        means = _distinct(*([mean(row) for row in part] for part in rows))
        for (name, curve), part in zip(means.items(), rows, strict=False):
            errors = [stdev(row) if len(row) > 1 else 0.0 for row in part]
            axes.errorbar(counts, curve, errors, marker="o", capsize=4, label=name)
        axes.set_xticks(counts)
        end_at_100(axes)


def draw_consistency(path: Path, found: Sequence[Consistency]) -> None:
    """Draw similarity and its targets by length, DACL by length, similarity by op."""
    with panels(path, 3) as (lengths, levels, ops):
        for number, one in enumerate(found):
            color = f"C{number}"
            lengths.plot(list(one.similarity), list(one.similarity.values()), color, marker="o")
            if one.targets == "its MMNN":
                lengths.plot(list(one.target), list(one.target.values()), color, linestyle="--")
            label = shown(one.name) if one.targets == "its MMNN" else f"{shown(one.name)}: to {one.targets}"
            levels.plot(list(one.dacl), list(one.dacl.values()), color, marker="o", label=label)
        if any(one.targets == "its MMNN" for one in found):
            lengths.plot([], [], "grey", marker="o", label="similarity")  # names stand beside, and would hide curves
            lengths.plot([], [], "grey", linestyle="--", label="target of its MMNN")
        order = sorted(found[0].by_op, key=lambda op: found[0].by_op[op])
        rows = [[one.by_op.get(op, float("nan")) for one in found] for op in order]
        ops.hlines(range(len(order)), [min(row) for row in rows], [max(row) for row in rows], color="lightgrey")
        for number, one in enumerate(found):
            ops.plot([row[number] for row in rows], range(len(order)), "o", color=f"C{number}", label=shown(one.name))
        ops.set_yticks(range(len(order)), order, fontsize=8)
        ops.locator_params(axis="x", nbins=6)
        lengths.set(title="latent similarity", xlabel="length of the composite", ylabel="cosine similarity")
        levels.set(title="distance to the target (DACL)", xlabel="length of the composite", ylabel="mean |s - g|")
        ops.set(title="by basic augmentation", xlabel="cosine similarity")
        for axes in (lengths, levels):
            axes.set_xticks(list(found[0].similarity))
        for axes in (lengths, levels, ops):
            legend(axes)


def draw_spectra(path: Path, found: Sequence[Spectrum]) -> None:
    """Draw singular values, largest first, on a logarithmic axis."""
    with _frame(path, "singular values of the features", "place, largest first", "singular value") as axes:
        lowest = max((one.singular_values[0] for one in found), default=1.0) * 1e-5
        for one in found:
            label = f"{shown(one.name)}: effective rank {one.effective_rank:.0f}"
            values = [value if value > lowest else float("nan") for value in one.singular_values]
            axes.semilogy(range(1, 1 + len(values)), values, label=label)


def draw_points(path: Path, title: str, points: npt.NDArray[np.float32], classes: Sequence[str]) -> None:
    """Draw points (N, 2) in the colours of their ``classes``, grey where "" stands; a legend names up to 20."""
    known, own = sorted(set(classes) - {""}), np.array(classes)
    with panels(path, 1, width=1.6 * WIDTH) as (axes,):
        from matplotlib import colormaps

        colours = colormaps["tab10" if len(known) <= 10 else "tab20" if len(known) <= 20 else "hsv"]
        for number, name in enumerate(["", *known], start=-1):
            color = "lightgrey" if not name else colours(number if len(known) <= 20 else number / len(known))
            label = shown(name) if name and len(known) <= 20 else None
            across, up = points[own == name].T
            axes.scatter(across, up, s=6, color=color, label=label, linewidths=0)
        axes.set(title=shown(title), xticks=[], yticks=[])
        legend(axes, loc="center left", bbox_to_anchor=(1, 0.5), markerscale=2)


def draw_table(path: Path, rows: dict[str, dict[str, float]], title: str) -> None:
    """Draw bars: for each data set in ``rows`` every encoder's accuracy in [0, 1]."""
    encoders = list(dict.fromkeys(name for row in rows.values() for name in row))  # in the order of the call
    total = max(WIDTH, 0.9 * len(rows) * max(1, 0.5 * len(encoders)))
    with _frame(path, title, "", "accuracy (%)", width=total) as axes:
        percent = {row: {name: 100 * value for name, value in found.items()} for row, found in rows.items()}
        for bars in _bars(axes, percent, encoders):
            axes.bar_label(bars, fmt="%.1f", fontsize=7)
        margin = 0.6 + max(0, 3 - len(rows)) / 2  # so that few bars are no walls
        lines = sum(1 + legend_text(shown(name)).count("\n") for name in encoders)
        names = min(0.6, 0.05 + 0.065 * lines)  # share of the height that they take, and hide no bars there
        axes.set(ylim=(0, 105 / (1 - names)), xlim=(-margin, len(rows) - 1 + margin))
        axes.set_yticks(range(0, 101, 20))


def _bars(axes: "Axes", rows: dict[str, dict[str, float]], encoders: Sequence[str]) -> Iterator["BarContainer"]:
    """Draw for each of ``rows`` the values of every encoder side by side; yield each encoder's bars."""
    width = 0.8 / max(1, len(encoders))
    for number, name in enumerate(encoders):
        shift = (number - (len(encoders) - 1) / 2) * width
        values = [row.get(name, float("nan")) for row in rows.values()]
        yield axes.bar([at + shift for at in range(len(rows))], values, width, label=shown(name))
    axes.set_xticks(range(len(rows)), [shown(name) for name in rows], rotation=30, ha="right", fontsize=8)
    axes.set_axisbelow(True)


def draw_invariance(path: Path, found: Sequence[Invariance]) -> None:
    """Draw R^2 by augmentation, best kept first, and the accuracies of the tasks over chance."""
    order = sorted(found[0].r2, key=lambda op: -found[0].r2[op])
    tasks = {"which hue": "hue", "which quarter turn": "turn", "neighbours of the same hue": "same_hue"}
    with panels(path, 2, width=1.4 * WIDTH) as (composition, kept):
        rows = {op: {one.name: one.r2[op] for one in found} for op in order}
        rows = {"mean": {one.name: one.mean_r2 for one in found}} | rows
        accuracies = {text: {one.name: 100 * getattr(one, name) for one in found} for text, name in tasks.items()}
        names = [one.name for one in found]
        list(_bars(composition, rows, names))
        for bars in _bars(kept, accuracies, names):
            kept.bar_label(bars, fmt="%.1f", fontsize=7)
        chances = found[0].hue_chance, found[0].turn_chance, found[0].hue_chance
        at = range(len(tasks))
        kept.hlines([100 * chance for chance in chances], [x - 0.45 for x in at], [x + 0.45 for x in at],
                    "black", linestyle="--", label="by chance")  # fmt: skip
        composition.set(title="composition read back from features", ylabel="R² of the count, test images")
        kept.set(title="colour and orientation", ylabel="accuracy, share of neighbours (%)", ylim=(0, 100))
        for axes in (composition, kept):
            legend(axes)


def _distinct(top1: list[float], class_mean: list[float]) -> dict[str, list[float]]:
    """Return a single curve if the two would hide each other, as they do in balanced splits."""
    equal = all(abs(value - other) < 0.05 for value, other in zip(top1, class_mean, strict=True))
    return {"top-1 = mean per class": top1} if equal else {"top-1": top1, "mean per class": class_mean}


def drawn(path: Path, draw: Callable[..., None], *arguments: Any) -> str:
    """Draw to ``path`` and say so in a line; without matplotlib, say that instead."""
    try:
        draw(path, *arguments)
        return f"picture: {path}"
    except UserError as error:
        if "matplotlib" not in str(error):
            raise
        return f"no picture: {error}"
