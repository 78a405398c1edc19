"""Report of the loader benchmark: table, summary, ratios and picture."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import Column, markdown, row
from benchmarks.loading.cases import Absent, Measured
from benchmarks.loading.contenders import Contender
from benchmarks.loading.stages import STAGES, TITLES, Stage
from cocor.panels import panels

Case = Measured | Absent

COLUMNS = (
    Column("loader", -13), Column("stage", -19), Column("samples/s", 9, ",.0f"), Column("±", 4, ".0%"),
    Column("views/s", 8, ",.0f"), Column("a core", 7, ",.0f"), Column("cores", 5, ".1f"), Column("taken", 6, ".1%"),
    Column("p50 ms", 7, ".1f"), Column("p99 ms", 7, ".1f"), Column("reserved", 8, ".2f"), Column("card", 5, ".1f"),
)  # fmt: skip
# Ratios that its README quotes, of full batches; the last one is over decoding alone.
_RATIOS: tuple[tuple[Contender, Contender, Stage], ...] = (
    ("dali", "dali-auto-aug", "composites"),
    *((ours, "torchvision", "composites") for ours in ("dali", "ffcv", "torch")),
    ("dali", "torch", "composites"),
    ("ffcv", "torch", "composites"),
    ("ffcv", "libjpeg-turbo", "decode"),
)


def case_line(case: Case) -> str:
    """Format a case as a row of the table, or say why it is absent."""
    if isinstance(case, Absent):
        return f"{case.loader:<13} {TITLES[case.stage]:<19} absent: {case.reason}"
    values = [
        *(case.loader, TITLES[case.stage], case.samples_per_s, case.spread if case.windows > 1 else None),
        *(case.views_per_s or None, case.samples_per_s_per_core, case.cores_busy, case.gpu_share),
        *(case.batch_ms_p50, case.batch_ms_p99, case.gpu_reserved_gib, case.gpu_used_gib),
    ]
    return row(COLUMNS, values) + (f"  {case.note}" if case.note else "")


def summary(cases: Sequence[Case]) -> str:
    """Format samples a second, loaders by stages, in Markdown."""
    stages = [stage for stage in STAGES if any(case.stage == stage for case in cases)]
    rates = {(c.loader, c.stage): f"{c.samples_per_s:,.0f}" for c in cases if isinstance(c, Measured)}
    loaders = dict.fromkeys(case.loader for case in cases)
    rows = [[loader, *(rates.get((loader, stage), "") for stage in stages)] for loader in loaders]
    return markdown(["samples/s", *(TITLES[stage] for stage in stages)], rows)


def ratios(cases: Sequence[Case]) -> Iterator[dict[str, Any]]:
    """Yield one case's samples a second, and a core, over another's."""
    found = {(case.loader, case.stage): case for case in cases if isinstance(case, Measured)}
    for ours, theirs, stage in _RATIOS:
        one, other = found.get((ours, "composites")), found.get((theirs, stage))
        if one is not None and other is not None:
            yield {
                "name": f"{ours} / {theirs}" + ("" if stage == "composites" else f" ({TITLES[stage]} alone)"),
                "samples_per_s": one.samples_per_s / other.samples_per_s,
                "per_core": one.samples_per_s_per_core / other.samples_per_s_per_core,
            }


def ratio_lines(cases: Sequence[Case]) -> list[str]:
    """Format the ratios."""
    lines = [f"{r['name']}: {r['samples_per_s']:.2f}x samples/s, {r['per_core']:.2f}x a core" for r in ratios(cases)]
    return ["with all six views:", *lines] if lines else []


def plot(cases: Sequence[Case], title: str, path: Path) -> None:
    """Draw bars of samples a second; those of ``synthetic`` end at the longest other."""
    rates = {(case.loader, case.stage): case.samples_per_s for case in cases if isinstance(case, Measured)}
    loaders = list(dict.fromkeys(loader for loader, _ in rates))
    stages = [stage for stage in STAGES if any(stage == there for _, there in rates)]
    longest = max((rate for (loader, _), rate in rates.items() if loader != "synthetic"), default=0.0)
    longest = longest or max(rates.values(), default=1.0)
    height = 0.8 / max(1, len(stages))
    with panels(path, 1, width=10) as (axes,):
        axes.figure.set_figheight(1.5 + 0.7 * len(loaders))  # type: ignore[union-attr]
        for number, stage in enumerate(stages):
            places = [i for i, loader in enumerate(loaders) if (loader, stage) in rates]
            values = [rates[loaders[i], stage] for i in places]
            at = [i + (number - (len(stages) - 1) / 2) * height for i in places]
            lengths = [min(value, longest) for value in values]
            bars = axes.barh(at, lengths, 0.9 * height, label=TITLES[stage])
            numbers = [f"{value:,.0f}" + (" \N{RIGHTWARDS ARROW}" if value > longest else "") for value in values]
            axes.bar_label(bars, numbers, padding=2, fontsize=6)
        axes.set_yticks(range(len(loaders)), loaders)
        axes.invert_yaxis()
        axes.set_xlim(0, 1.1 * longest)  # room for the numbers
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.set_xlabel("samples/s (\N{RIGHTWARDS ARROW}: longer than shown)")
        axes.set_title(title, fontsize=7)
        axes.legend(fontsize=7)
