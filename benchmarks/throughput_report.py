"""What a run of :mod:`throughput` found: rows of its table, the summary, ratios, and all of it for the JSON file."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from cells import Absent, Measured, Settings
from common import Column, markdown, row
from sources import Contender
from stages import STAGES, TITLES, Stage

Cell = Measured | Absent

COLUMNS = (
    Column("loader", -13),
    Column("stage", -19),
    Column("samples/s", 9, ",.0f"),
    Column("±", 4, ".0%"),
    Column("views/s", 8, ",.0f"),
    Column("a core", 7, ",.0f"),
    Column("cores", 5, ".1f"),
    Column("taken", 6, ".1%"),
    Column("p50 ms", 7, ".1f"),
    Column("p99 ms", 7, ".1f"),
    Column("reserved", 8, ".2f"),
    Column("card", 5, ".1f"),
)


@dataclass(frozen=True)
class Ratio:
    """One cell's samples a second, and samples a second and core, over another's."""

    name: str
    samples_per_s: float
    per_core: float


@dataclass
class Report:
    """All that a run found, as the JSON file has it. ``executor``: the CPU executor against Pillow, as
    :func:`executor.measure` gives it, if that was measured."""

    machine: dict[str, Any]
    data: dict[str, Any]
    settings: Settings
    cells: list[Cell] = field(default_factory=list)
    executor: dict[str, Any] | None = None

    def to_dict(self) -> dict[str, Any]:
        return {
            "benchmark": "throughput",
            "machine": self.machine,
            "data": self.data,
            "settings": asdict(self.settings),
            "cells": [asdict(cell) for cell in self.cells],
            "executor": self.executor,
            "ratios": [asdict(ratio) for ratio in ratios(self.cells)],
        }


def cell_line(cell: Cell) -> str:
    """A cell as a row of the table, or why it is absent."""
    if isinstance(cell, Absent):
        return f"{cell.loader:<13} {TITLES[cell.stage]:<19} absent: {cell.reason}"
    values = [
        *(cell.loader, TITLES[cell.stage], cell.samples_per_s, cell.spread if cell.windows > 1 else None),
        *(cell.views_per_s or None, cell.samples_per_s_per_core, cell.cores_busy, cell.gpu_share),
        *(cell.batch_ms_p50, cell.batch_ms_p99, cell.gpu_reserved_gib, cell.gpu_used_gib),
    ]
    return row(COLUMNS, values) + (f"  {cell.note}" if cell.note else "")


def summary(cells: Sequence[Cell]) -> str:
    """Samples a second, loaders by stages, in Markdown."""
    loaders = list(dict.fromkeys(cell.loader for cell in cells))
    stages = [stage for stage in STAGES if any(cell.stage == stage for cell in cells)]
    rates = {(c.loader, c.stage): f"{c.samples_per_s:,.0f}" for c in cells if isinstance(c, Measured)}
    rows = [[loader, *(rates.get((loader, stage), "") for stage in stages)] for loader in loaders]
    return markdown(["samples/s", *(TITLES[stage] for stage in stages)], rows)


def ratios(cells: Sequence[Cell]) -> Iterator[Ratio]:
    """The ratios that the README quotes, as far as both of their cells are there."""
    found = {(cell.loader, cell.stage): cell for cell in cells if isinstance(cell, Measured)}
    wanted: list[tuple[Contender, Contender, Stage]] = [
        ("dali", "dali-auto-aug", "composites"),
        ("dali", "torchvision", "composites"),
        ("ffcv", "torchvision", "composites"),
        ("torch", "torchvision", "composites"),
        ("dali", "torch", "composites"),
        ("ffcv", "torch", "composites"),
        ("ffcv", "libjpeg-turbo", "decode"),
    ]
    for ours, theirs, stage in wanted:
        one, other = found.get((ours, "composites")), found.get((theirs, stage))
        if one is not None and other is not None:
            yield Ratio(
                f"{ours} / {theirs}" + ("" if stage == "composites" else f" ({TITLES[stage]} alone)"),
                one.samples_per_s / other.samples_per_s,
                one.samples_per_s_per_core / other.samples_per_s_per_core,
            )


def ratio_lines(report: Report) -> list[str]:
    """The report's ratios, one a line."""
    lines = [f"{r.name}: {r.samples_per_s:.2f}x samples/s, {r.per_core:.2f}x a core" for r in ratios(report.cells)]
    if report.executor is not None:
        found = report.executor
        lines.append(f"CPU executor / Pillow, views a core: {found['ratio']:.1f}x ({found['box_ratio']:.1f}x box blur)")
    return ["with all six views:", *lines] if lines else []
