"""Fill the paper's transfer table: a linear probe on each of its data sets.

Missing sets are named and skipped. The table is rewritten after every set, so an interrupted run keeps its results, and
cached features make the next one quick.
"""

import csv
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cocor.eval.datasets.protocols import PROTOCOLS
from cocor.eval.datasets.splits import Absent, Splits, open_named
from cocor.eval.probes.linear import LinearResult
from cocor.weights.load import Encoder
from loaders.errors import UserError
from loaders.files import write_text

Probe = Callable[[Encoder, Splits], LinearResult]


@dataclass
class Table:
    """Results by data set and encoder; what was absent, failed or is noted."""

    encoders: list[str]
    results: dict[str, dict[str, LinearResult]] = field(default_factory=dict)
    absent: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    notes: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def accuracies(self) -> dict[str, dict[str, float]]:
        """Map accuracies, in the protocol's metric, by title of the set and encoder."""
        return {
            PROTOCOLS[name].title: {encoder: result.accuracy for encoder, result in row.items()}
            for name, row in self.results.items()
        }

    def markdown(self) -> str:
        """Format a table with a row a data set, accuracies in per cent."""
        rows = ["| data set | metric | " + " | ".join(self.encoders) + " |", "|---|---|" + "---:|" * len(self.encoders)]
        for name, row in self.results.items():
            cells = " | ".join(f"{100 * row[e].accuracy:.2f}" if e in row else "" for e in self.encoders)
            rows.append(f"| {PROTOCOLS[name].title} | {PROTOCOLS[name].metric} | {cells} |")
        if (count := len(self.results)) > 1:
            means = [sum(row[e].accuracy for row in self.results.values() if e in row) / count for e in self.encoders]
            rows.append("| mean | | " + " | ".join(f"{100 * mean:.2f}" for mean in means) + " |")
        rows += ["", *(f"- {PROTOCOLS[n].title}: {'; '.join(notes)}." for n, notes in self.notes.items() if notes)]
        rows += [f"- {PROTOCOLS[name].title} failed: {reason}." for name, reason in self.failed.items()]
        rows += [f"- Not found: {', '.join(PROTOCOLS[name].title for name in self.absent)}."] if self.absent else []
        return "\n".join(rows).rstrip() + "\n"

    def csv(self) -> str:
        """Format a row a data set and encoder, with both metrics and the penalty."""
        text = io.StringIO()
        write = csv.writer(text, lineterminator="\n")
        numbers = ["top1", "class_mean", "penalty", "converged", "train", "val", "test"]
        write.writerow(["data_set", "encoder", "metric", *numbers])
        for name, row in self.results.items():
            for encoder, r in row.items():
                scores = [f"{r.top1:.6f}", f"{r.class_mean:.6f}", f"{r.penalty:.6g}", r.converged]
                write.writerow([name, encoder, r.metric, *scores, r.train, r.val, r.test])
        return text.getvalue()

    def save(self, folder: Path) -> None:
        """Write transfer.csv and transfer.md to ``folder``."""
        write_text(folder / "transfer.csv", self.csv())
        write_text(folder / "transfer.md", self.markdown())


def transfer(
    encoders: Sequence[Encoder], names: Sequence[str], root: Path, cache: Path, probe: Probe, *,
    workers: int | None = None, after_each: Callable[[Table], None] = lambda table: None,
    say: Callable[[str], None] = print,
) -> Table:  # fmt: skip
    """Probe every encoder on every set of ``names`` that lies below ``root``.

    Raises:
        UserError: ``root`` is no folder, or none of the sets is usable.
    """
    if not root.is_dir():
        raise UserError(f"--root {root}: no such folder")
    table = Table([encoder.name for encoder in encoders])
    for name in names:
        try:
            splits = open_named(name, root, cache, workers)
            row = {encoder.name: probe(encoder, splits) for encoder in encoders}
        except Absent as error:
            table.absent.append(name)
            say(str(error))
        except UserError as error:  # damaged: the other sets need not suffer
            table.failed[name] = str(error)
            say(f"{PROTOCOLS[name].title} failed: {error}")
        else:
            table.results[name], table.notes[name] = row, splits.notes
            for encoder, result in row.items():
                say(f"{PROTOCOLS[name].title}, {encoder}: {result.lines()[0]}")
            after_each(table)
    if not table.results:
        raise UserError(f"--root {root}: none of the {len(names)} data sets is usable there: {', '.join(names)}")
    after_each(table)  # with the last sets that were not there
    return table
