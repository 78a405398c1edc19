"""Report of the loader benchmark: table, summary and ratios."""

from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.common import Column, markdown, row
from benchmarks.loading.cases import Absent, Measured
from benchmarks.loading.stages import STAGES, TITLES, Stage

Case = Measured | Absent

COLUMNS = (
    Column("loader", -15), Column("stage", -19), Column("samples/s", 9, ",.0f"), Column("±", 4, ".0%"),
    Column("views/s", 8, ",.0f"), Column("a core", 7, ",.0f"), Column("cores", 5, ".1f"), Column("taken", 6, ".1%"),
    Column("p50 ms", 7, ".1f"), Column("p99 ms", 7, ".1f"), Column("reserved", 8, ".2f"), Column("card", 5, ".1f"),
)  # fmt: skip
# Ratios that its README quotes, of full batches; the last one is over decoding alone.
_RATIOS: tuple[tuple[str, str, Stage], ...] = (
    ("dali", "dali-auto-aug", "composites"),
    *((ours, "torchvision", "composites") for ours in ("dali", "ffcv", "torch")),
    ("dali", "torch", "composites"),
    ("ffcv", "torch", "composites"),
    ("ffcv", "libjpeg-turbo", "decode"),
)


def label(case: Case) -> str:
    """Name a case's loader, and how late its files come."""
    return case.loader if case.latency_ms is None else f"{case.loader} +{case.latency_ms:g} ms"


def case_line(case: Case) -> str:
    """Format a case as a row of the table, or say why it is absent."""
    if isinstance(case, Absent):
        return f"{label(case):<15} {TITLES[case.stage]:<19} absent: {case.reason}"
    values = [
        *(label(case), TITLES[case.stage], case.samples_per_s, case.spread if case.windows > 1 else None),
        *(case.views_per_s or None, case.samples_per_s_per_core, case.cores_busy, case.gpu_share),
        *(case.batch_ms_p50, case.batch_ms_p99, case.gpu_reserved_gib, case.gpu_used_gib),
    ]
    return row(COLUMNS, values) + (f"  {case.note}" if case.note else "")


def summary(cases: Sequence[Case]) -> str:
    """Format samples a second, loaders by stages, in Markdown."""
    stages = [stage for stage in STAGES if any(case.stage == stage for case in cases)]
    rates = {(label(c), c.stage): f"{c.samples_per_s:,.0f}" for c in cases if isinstance(c, Measured)}
    loaders = dict.fromkeys(map(label, cases))
    rows = [[loader, *(rates.get((loader, stage), "") for stage in stages)] for loader in loaders]
    return markdown(["samples/s", *(TITLES[stage] for stage in stages)], rows)


def ratios(cases: Sequence[Case]) -> Iterator[dict[str, Any]]:
    """Yield one case's samples a second, and a core, over another's."""
    cached = [case for case in cases if isinstance(case, Measured) and case.latency_ms is None]
    found = {(case.loader, case.stage): case for case in cached}
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
