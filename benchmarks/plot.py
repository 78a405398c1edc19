"""The throughput table as a picture: a group of bars for each loader, a bar for each stage, from 0 on.

Those of ``synthetic``, which reads no files, are cut off at the longest of the others.
"""

from collections.abc import Sequence
from pathlib import Path

from cells import Absent, Measured
from stages import STAGES, TITLES


def plot_cells(cells: Sequence[Measured | Absent], title: str, path: Path) -> None:
    """Draw samples a second into ``path``."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rates = {(cell.loader, cell.stage): cell.samples_per_s for cell in cells if isinstance(cell, Measured)}
    loaders = list(dict.fromkeys(loader for loader, _ in rates))
    figure = Figure(figsize=(10, 1.5 + 0.7 * len(loaders)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    longest = max((rate for (loader, _), rate in rates.items() if loader != "synthetic"), default=0.0)
    longest = longest or max(rates.values(), default=1.0)
    stages = [stage for stage in STAGES if any(stage == there for _, there in rates)]
    height = 0.8 / max(1, len(stages))
    for number, stage in enumerate(stages):
        places = [i for i, loader in enumerate(loaders) if (loader, stage) in rates]
        offset = (number - (len(stages) - 1) / 2) * height
        values = [rates[loaders[i], stage] for i in places]
        lengths = [min(value, longest) for value in values]
        bars = axes.barh([i + offset for i in places], lengths, 0.9 * height, label=TITLES[stage])
        numbers = [f"{value:,.0f}" + (" \N{RIGHTWARDS ARROW}" if value > longest else "") for value in values]
        axes.bar_label(bars, numbers, padding=2, fontsize=6)
    axes.set_yticks(range(len(loaders)), loaders)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.1 * longest)  # room for the numbers
    axes.xaxis.set_major_formatter("{x:,.0f}")
    cut = any(rate > longest for rate in rates.values())
    axes.set_xlabel("samples/s" + (" (\N{RIGHTWARDS ARROW}: longer than shown)" if cut else ""))
    axes.set_title(title, fontsize=7)
    figure.legend(fontsize=7, loc="outside lower center", ncols=len(STAGES))
    figure.savefig(path, dpi=150)
