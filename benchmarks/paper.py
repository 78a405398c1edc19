"""Run the paper's tables and figures: commands, cost, results in its layout.

    python benchmarks/paper.py                                  # all tables: rows, state, hours
    python benchmarks/paper.py mmnn                             # the commands of one, in order
    python benchmarks/paper.py mmnn --run --data IMAGENET100 --root SETS -- --gpus 4
    python benchmarks/paper.py mmnn --run --scale cifar --data cifar10
    python benchmarks/paper.py mmnn --report                    # paper, ours, expected

--data holds train and val (or test); --root the other sets, as cocor-eval reads them. The same command continues what
was stopped: runs resume, and evaluations whose numbers exist are kept. Tables share runs that are equal. What stands
behind -- goes to every training; where it changes what is learnt, those are other runs, in folders of their own, which
--report finds with the same flags. GPU hours are projected (of pre-training alone; see configs/moco_in1k.yaml).
Expected is what a study here measured with the same flags: its seeds, of three and more the mean with 95 % t interval.
"""

import argparse
import json
import math
import re
import shlex
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])

from scipy import stats

from benchmarks.common import RESULTS, Column, command, header, markdown, row
from benchmarks.evidence import registry
from benchmarks.evidence.registry import DRAWINGS, MEASURED_MMNN, SCALES, TABLES, WORK, Row, Table
from benchmarks.evidence.report import seconds_of, values
from cocor.auxiliary import AUXILIARIES
from cocor.config.options import FREE_TO_CHANGE, Config
from cocor.config.resolve import load
from cocor.metrics_file import epochs_of, read_run
from cocor.monitor.profile import costs
from loaders.arguments import Parser, not_negative
from loaders.errors import UserError

_CONFIGS = Path(__file__).resolve().parents[1] / "configs"
_MODULES = {"cocor-train": "cocor.train", "cocor-eval": "cocor.eval.cli"}
_SEVERAL = ("consistency", "spectrum")  # commands that show several encoders side by side


@dataclass(frozen=True)
class Job:
    """Command, and what an evaluation writes; a training knows whether it is done."""

    words: tuple[str, ...]
    result: Path | None = None


@dataclass(frozen=True)
class Plan:
    """A table at a scale: what to run for it, where, and with which further flags."""

    table: Table
    scale: str
    data: str = "DATA"
    root: str = "ROOT"
    output: Path = Path("runs/paper")
    seeds: tuple[int, ...] = (0,)
    further: tuple[str, ...] = ()

    @property
    def columns(self) -> tuple[registry.Column, ...]:
        """Return the measures: those of the paper, or of a reduced scale."""
        return SCALES[self.scale].columns if self.reduced and self.table.columns else self.table.columns

    @property
    def reduced(self) -> bool:
        return self.scale not in self.table.scales

    def missing(self, one: Row) -> str:
        """Say why a row cannot be run; empty if it can."""
        wanted = re.search(r"--auxiliary (\w+)", one.flags)
        lacks = f"there is no --auxiliary {wanted[1]}" if wanted and wanted[1] not in AUXILIARIES else ""
        file = _CONFIGS / f"{SCALES[self.scale].file.format(method=one.method)}.yaml"
        return one.missing or lacks or ("" if file.is_file() else f"there is no configs/{file.name}")

    def own_flags(self, one: Row) -> list[str]:
        """Return the flags that make a row what it is at this scale."""
        return [*([] if self.reduced else self.table.flags.split()), *one.flags.split()]

    def flags(self, one: Row) -> list[str]:
        """Return all flags of a training but those that name files and the seed."""
        scale = SCALES[self.scale]
        words = ["--config", f"configs/{scale.file.format(method=one.method)}.yaml", *scale.flags.split()]
        if self.reduced and MEASURED_MMNN not in one.flags:
            learns = load(_found([*words, *one.flags.split()])).learns_targets
            words += MEASURED_MMNN.split() if learns else []
        return [*words, *self.own_flags(one), *self.further]

    def config(self, one: Row) -> Config:
        """Resolve a row's settings. UserError for further flags that do not fit."""
        return load(_found(self.flags(one)))

    def changes(self, one: Row) -> list[str]:
        """Return the settings by which the further flags make another run of a row."""
        usual, mine = replace(self, further=()).config(one).to_dict(), self.config(one).to_dict()
        apart = FREE_TO_CHANGE - {"knn_k", "knn_temperature"}  # which enter what is measured
        return [f"{key} {value}" for key, value in mine.items() if key not in apart and usual[key] != value]

    def hours(self, one: Row) -> float:
        """Project the GPU hours of one seed, without the labelled images."""
        config, scale = self.config(one), SCALES[self.scale]
        passes = sum(cost for part, cost in costs(config, 1).items() if part != "labelled")
        work = 1.0 if self.reduced else WORK.get(config.backbone, 1.0)
        return scale.images * config.epochs * passes * work / scale.passes_per_s / 3600

    def folder(self, one: Row, seed: int) -> Path:
        """Name the folder of a run by its flags, so that tables share equal runs."""
        name = re.sub(r"[^\w.]+", "-", " ".join([one.method, *self.own_flags(one), *self.changes(one)]))
        return self.output / f"{name}-seed{seed}"

    def evaluation(self, text: str, folders: Sequence[Path], name: str) -> Job:
        """Return the job of a command of cocor-eval for the runs in ``folders``."""
        kind, *words = text.split()
        data = words[words.index("--dataset") + 1] if not self.reduced else self.scale
        images = ["--data", self.data] if self.reduced else [*words, "--root", self.root]
        output = self.output / "eval" / name / data
        result = output / ("detect_c4.json" if kind == "detect" else f"{kind}.json")
        return Job(("cocor-eval", kind, *map(str, folders), *images, "--output", str(output)), result)

    def jobs(self, one: Row, seed: int) -> list[Job]:
        """Return a row's training and evaluations."""
        folder = self.folder(one, seed)
        files = ["--data", self.data, "--output", str(folder), "--seed", str(seed), "--resume"]
        training = Job(("cocor-train", *self.flags(one), *files))
        alone = [text for text in self.table.pictures if text.split()[0] not in _SEVERAL]
        wanted = dict.fromkeys([*(column.command for column in self.columns if column.command), *alone])
        return list(dict.fromkeys([training, *(self.evaluation(text, [folder], folder.name) for text in wanted)]))

    def together(self, key: str) -> list[Job]:
        """Return the evaluations that show the rows side by side, of the first seed."""
        folders = [self.folder(one, self.seeds[0]) for one in self.rows()]
        several = [text for text in self.table.pictures if text.split()[0] in _SEVERAL]
        return [self.evaluation(text, folders, key) for text in several] if folders else []

    def rows(self) -> list[Row]:
        """Return the rows that can be run."""
        return [one for one in self.table.rows if not self.missing(one)]

    def value(self, column: registry.Column, one: Row, seed: int) -> float:
        """Read what was measured, in per cent or hours; NaN if it was not."""
        folder = self.folder(one, seed)
        if not column.command:
            records = read_run(folder) if folder.is_dir() else []
            return of_training(column.key, records, self.config(one))
        file = self.evaluation(column.command, [folder], folder.name).result
        return number(column, json.loads(file.read_text())) if file is not None and file.is_file() else math.nan

    def expected(self, column: registry.Column, one: Row) -> list[float]:
        """Return what was measured here with the same flags, in per cent, by seed."""
        if not self.reduced or not one.measured or self.changes(one):
            return []
        stored = json.loads((RESULTS / SCALES[self.scale].results).read_text())["runs"]
        same = [run for run in stored if (run["method"], run["variant"]) == (one.method, one.measured)]
        found = [run.get("linear") if column.command else run["knn"][-1][1] for run in same]
        return [100 * value for value in found if value is not None]


def of_training(key: str, records: list[dict[str, Any]], config: Config) -> float:
    """Find the hours of a finished training, or k-NN after its end, in per cent; else NaN."""
    if key == "knn":
        found = [r["accuracy"] for r in records if r["kind"] == "knn" and r["epoch"] == config.epochs]
        return 100 * found[-1] if found else math.nan
    done = max(epochs_of(records), default=0.0) > config.epochs - 0.5
    steps = [r for r in records if r["kind"] == "train"]
    return seconds_of(steps) * config.batch_size / 3600 if done else math.nan


def number(column: registry.Column, report: dict[str, Any]) -> float:
    """Find a column's number in a report of cocor-eval, in per cent."""
    kind = column.command.split()[0]
    if kind == "detect":
        precision = report["result"]["precision"][column.key]
        return math.nan if precision is None else float(precision)
    metric = report["protocol"]["metric"].replace("-", "_")
    if kind == "fewshot":
        (shots,) = (one for one in report["shots"] if one["shots"] == int(column.key))
        return 100 * statistics.fmean(shots[metric])
    return 100 * float(report["result"][metric])


def interval(percent: Sequence[float]) -> str:
    """Format ``75.8, 75.4``; of three and more the mean with its 95 % t interval."""
    if len(percent) < 3:
        return values(percent, 1.0) if percent else "-"
    low, high = stats.ttest_1samp(percent, 0.0).confidence_interval(0.95)
    return f"{statistics.fmean(percent):.1f} [{low:.1f}, {high:.1f}]"


def filled(plan: Plan, key: str) -> str:
    """Format a table in the paper's layout: rows as printed, found and expected.

    Of what has no numbers, name the pictures.
    """
    if not plan.columns:
        results = [step.result for step in steps(plan, key) if isinstance(step, Job) and step.result is not None]
        return "\n".join(f"- {file}{'' if file.is_file() else ': not there yet'}" for file in results)
    lines = []
    for one in plan.table.rows:
        if one.paper:
            printed = [f"{value:.2f}" for value in one.paper]
            place = f" ({SCALES[plan.table.scales[0]].data}, {plan.table.columns[0].title})" if plan.reduced else ""
            cells = [printed[0], *("-" for _ in plan.columns[1:])] if plan.reduced else printed
            lines.append([f"{one.title}: paper{place}", *cells])
        if why := plan.missing(one):
            lines.append([f"{one.title}: not available, {why}", *("-" for _ in plan.columns)])
            continue
        found = [[plan.value(column, one, seed) for seed in plan.seeds] for column in plan.columns]
        lines.append([f"{one.title}: ours", *(values(numbers, 1.0) for numbers in found)])
        expected = [interval(plan.expected(column, one)) for column in plan.columns]
        if set(expected) - {"-"}:
            lines.append([f"{one.title}: expected", *expected])
    return markdown(["%", *(column.title for column in plan.columns)], lines)


def steps(plan: Plan, key: str) -> Iterator[str | Job]:
    """Yield a table's rows in order, a heading and the jobs that are not repeated."""
    seen: set[Job] = set()
    for seed in plan.seeds:
        for one in plan.table.rows:
            if why := plan.missing(one):
                yield f"# {one.title}: not available, {why}"
                continue
            yield f"# {one.title}, seed {seed}: {plan.hours(one):.3g} {SCALES[plan.scale].gpu} hours"
            yield from (job for job in plan.jobs(one, seed) if job not in seen)
            seen.update(plan.jobs(one, seed))
    yield from plan.together(key)


def execute(job: Job) -> None:
    """Run a command that is not done. UserError if it fails."""
    if job.result is not None and job.result.exists():
        print(f"{job.result} is there")
        return
    name, *words = job.words
    with subprocess.Popen([sys.executable, "-P", "-m", _MODULES[name], *_found(words)]) as process:
        try:
            code = process.wait()
        except KeyboardInterrupt:  # which the command got as well: it saves a checkpoint
            process.wait()
            raise
    if code:
        raise UserError(f"{shlex.join(job.words[:3])} ... ended with exit code {code}; the same command goes on")


def _found(words: Sequence[str]) -> list[str]:
    """Complete the paths of configurations, which are printed as in the READMEs."""
    return [str(_CONFIGS / word.removeprefix("configs/")) if word.startswith("configs/") else word for word in words]


def listing() -> Iterator[str]:
    """Format all tables: rows, state, hours."""
    shown = [Column("", -13), Column("rows", 4), Column("can run", 7), Column("GPU hours", 9, ",.1f"), Column("", -60)]
    yield header(shown)
    for key, table in TABLES.items():
        plan = Plan(table, table.scales[0])
        able, lacks = plan.rows(), dict.fromkeys(filter(None, map(plan.missing, table.rows)))
        state = f"{table.title}{'; not available: ' if lacks else ''}{'; '.join(lacks)}"
        yield row(shown, [key, len(table.rows), len(able), sum(map(plan.hours, able)), state]).rstrip()
    yield f"Hours of one seed on H100s, projected; tables share runs. Nothing to run: {', '.join(DRAWINGS)}."


def parser() -> Parser:
    result = Parser("paper", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = result.add_argument
    add("table", nargs="?", choices=list(TABLES), metavar="TABLE", help="default: list all")
    add("--scale", choices=list(SCALES), help="data of the trainings (default: the paper's)")
    add("--run", action="store_true", help="run the commands instead of printing them")
    add("--report", action="store_true", help="fill the table with what was found")
    add("--data", default="DATA", metavar="DIR", help="training images: holds train, and val or test")
    add("--root", default="ROOT", metavar="DIR", help="data sets of evaluations")
    add("--output", type=Path, default=Path("runs/paper"), help="default: runs/paper")
    add("--seeds", type=not_negative, nargs="+", default=[0], help="default: 0")
    return result


def planned(options: argparse.Namespace, further: Sequence[str]) -> Plan:
    """Plan a table. UserError for a scale, a folder or flags that do not fit."""
    table = TABLES[options.table]
    able = (*table.scales, *(name for name in SCALES if table.reduced and name not in ("in100", "in1k")))
    scale = options.scale or table.scales[0]
    if scale not in able:
        raise UserError(f"--scale {scale}: not of this table; use {' or '.join(able)}")
    seeds = tuple(dict.fromkeys(options.seeds))
    plan = Plan(table, scale, options.data, options.root, options.output / scale, seeds, tuple(further))
    for one in plan.rows():
        plan.config(one)
    for flag, given in (("--data", options.data), ("--root", "." if plan.reduced else options.root)):
        if options.run and not Path(given).is_dir():
            raise UserError(f"{flag} {given}: no such folder; name that of the images")
    return plan


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    given = sys.argv[1:] if argv is None else list(argv)
    end = given.index("--") if "--" in given else len(given)

    def body() -> None:
        options = parser().parse_all(given[:end])
        if options.table is None:
            print("\n".join(listing()))
            return
        plan = planned(options, given[end + 1 :])
        notes = [f"# {note}" for note in ((SCALES[plan.scale].note,) if plan.reduced else plan.table.notes)]
        if options.run or not options.report:
            print(f"# {plan.table.title}, {SCALES[plan.scale].data}", *notes, sep="\n")
            for step in steps(plan, options.table):
                print(step if isinstance(step, str) else shlex.join(step.words), flush=True)
                if options.run and isinstance(step, Job):
                    execute(step)
        if options.report:
            print(filled(plan, options.table), "", *notes, sep="\n")

    return command("paper", body)


if __name__ == "__main__":
    sys.exit(main())
