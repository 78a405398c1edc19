"""The pictures of an evaluation, in the style of :mod:`cocor.panels`.

matplotlib is an extra; without it a command still gives its numbers, and says what is missing (see :func:`drawn`).
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from cocor.eval.consistency import Consistency
from cocor.eval.fewshot import ShotResult
from cocor.eval.linear import Trial
from cocor.eval.spectrum import Spectrum
from cocor.panels import WIDTH, legend, panels
from loaders.errors import UserError


def draw_grid(path: Path, name: str, trials: Sequence[Trial], chosen: float) -> None:
    """Validation accuracy over the penalties of a linear probe."""
    with panels(path, 1) as (axes,):
        penalties = [trial.penalty for trial in trials]
        axes.semilogx(penalties, [100 * trial.top1 for trial in trials], marker=".", label="top-1")
        axes.semilogx(penalties, [100 * trial.class_mean for trial in trials], marker=".", label="mean per class")
        axes.axvline(chosen, color="grey", linestyle="--", label=f"chosen: {chosen:.2g}")
        axes.set(title=name, xlabel="l2 penalty w", ylabel="validation accuracy (%)")
        legend(axes)


def draw_curve(path: Path, title: str, xlabel: str, curves: dict[str, dict[int, float]]) -> None:
    """Accuracies in [0, 1] over small whole numbers, such as neighbours or shots."""
    with panels(path, 1) as (axes,):
        for name, curve in curves.items():
            axes.plot(list(curve), [100 * value for value in curve.values()], marker="o", label=name)
        axes.set(title=title, xlabel=xlabel, ylabel="accuracy (%)", xscale="log")
        ticks = sorted({key for curve in curves.values() for key in curve})
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.minorticks_off()
        legend(axes)


def draw_shots(path: Path, title: str, found: Sequence[ShotResult]) -> None:
    """Accuracy over images a class, mean and standard deviation over the draws."""
    with panels(path, 1) as (axes,):
        for name, pick in (("top-1", "top1"), ("mean per class", "class_mean")):
            rows = [[100 * value for value in getattr(result, pick)] for result in found]
            means, errors = [mean(row) for row in rows], [stdev(row) if len(row) > 1 else 0.0 for row in rows]
            axes.errorbar([result.shots for result in found], means, errors, marker="o", capsize=4, label=name)
        axes.set(title=title, xlabel="images a class", ylabel="accuracy (%), mean and deviation")
        axes.set_xticks([result.shots for result in found])
        legend(axes)


def draw_consistency(path: Path, found: Sequence[Consistency]) -> None:
    """Similarity by length with its targets, DACL by length, and similarity by basic augmentation."""
    with panels(path, 3) as (lengths, levels, ops):
        for number, one in enumerate(found):
            color = f"C{number}"
            lengths.plot(list(one.similarity), list(one.similarity.values()), color, marker="o", label=one.name)
            if one.targets == "its MMNN":
                lengths.plot(list(one.target), list(one.target.values()), color, linestyle="--", label="its MMNN")
            levels.plot(list(one.dacl), list(one.dacl.values()), color, marker="o", label=one.name)
        order = sorted(found[0].by_op, key=lambda op: found[0].by_op[op])
        height = 0.8 / len(found)
        for number, one in enumerate(found):
            places = [at + (number - (len(found) - 1) / 2) * height for at in range(len(order))]
            ops.barh(places, [one.by_op.get(op, 0.0) for op in order], height, color=f"C{number}", label=one.name)
        lowest = min(min(one.by_op.values()) for one in found)
        ops.set_yticks(range(len(order)), order, fontsize=8)
        ops.locator_params(axis="x", nbins=5)
        ops.set_xlim(max(-1.0, lowest - 0.05) if lowest > 0.1 else min(0.0, lowest), 1.0)
        lengths.set(title="latent similarity", xlabel="length of the composite", ylabel="cosine similarity")
        levels.set(title="distance to the target (DACL)", xlabel="length of the composite", ylabel="mean |s - g|")
        ops.set(title="by basic augmentation", xlabel="cosine similarity")
        for axes in (lengths, levels):
            axes.set_xticks(list(found[0].similarity))
            legend(axes)


def draw_spectra(path: Path, found: Sequence[Spectrum]) -> None:
    """Singular values, largest first, on a logarithmic axis."""
    with panels(path, 1) as (axes,):
        lowest = max((one.values[0] for one in found), default=1.0) * 1e-5
        for one in found:
            label = f"{one.name}: effective rank {one.effective_rank:.0f}"
            axes.semilogy([value if value > lowest else float("nan") for value in one.values], label=label)
        axes.set(title="singular values of the features", xlabel="place", ylabel="singular value (log)")
        legend(axes)


def draw_table(path: Path, rows: dict[str, dict[str, float]], title: str) -> None:
    """Bars: for every data set (``rows``) the accuracy in [0, 1] of every encoder."""
    encoders = list(dict.fromkeys(name for row in rows.values() for name in row))  # in the order of the call
    with panels(path, 1, width=max(WIDTH, 0.9 * len(rows) * max(1, 0.5 * len(encoders)))) as (axes,):
        width = 0.8 / max(1, len(encoders))
        for number, name in enumerate(encoders):
            shift = (number - (len(encoders) - 1) / 2) * width
            values = [100 * row.get(name, float("nan")) for row in rows.values()]
            bars = axes.bar([at + shift for at in range(len(rows))], values, width, label=name)
            axes.bar_label(bars, fmt="%.1f", fontsize=7)
        axes.set_xticks(range(len(rows)), list(rows), rotation=30, ha="right", fontsize=8)
        axes.set(title=title, ylabel="accuracy (%)", ylim=(0, 105))
        legend(axes)


def drawn(path: Path, draw: Callable[..., None], *arguments: Any) -> str:
    """Draw, and say where; without matplotlib say that instead, since numbers must not be lost to a picture."""
    try:
        draw(path, *arguments)
        return f"picture: {path}"
    except UserError as error:
        if "matplotlib" not in str(error):
            raise
        return f"no picture: {error}"
