"""Does CoCor help? Runs a named study over several seeds and reports means and standard deviations.

    D="--data cifar10/train --val-data cifar10/test"
    python benchmarks/evidence.py --study core $D --linear cifar10 --seeds 0 1 --epochs 100 --jobs 4
    python benchmarks/evidence.py --study tune $D --methods moco --seeds 0 --epochs 20 --only plain centre beta
    python benchmarks/evidence.py --study core $D -- --batch-size 256 --lr 0.03

A study is a set of variants of a method (:mod:`evidence_studies`), each trained from ``configs/cifar10_METHOD.yaml``
(or ``--configs``) for every seed, ``--jobs`` runs at a time, which share the GPUs; flags after ``--`` go to every run
(:mod:`evidence_flags`). With ``--linear DIR`` every trained run is evaluated by ``cocor-eval linear --data DIR``. The
same command continues a study that was stopped: it skips finished runs and resumes the others. If ``--linear`` is added
to the command of a finished study, its runs are evaluated without being trained again. The result, in ``--output``:

    STUDY.json   all curves    STUDY.md   the table    STUDY.png   k-NN over epochs, similarities and targets

The k-NN accuracy (k = 200, at most 20,000 training and 5,000 held-out images, see cocor/data.py) is that after the last
epoch, not the best. The linear probe's is top-1 on all test images. Gains are over the plain method of the same seed.
Minutes are those of training alone and depend on what else runs on the GPU.
"""

import argparse
import math
import re
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import torch

from cocor import atomic, cli, panels
from cocor.config import resolve
from cocor.config.options import FREE_TO_CHANGE, Method
from cocor.data import held_out_images
from cocor.eval.datasets.splits import open_splits
from common import machine_line, write_json
from evidence_flags import shared_flags
from evidence_report import Row, draw, measured, table
from evidence_runs import Crew, Training
from evidence_studies import STUDIES, Flags, Variant
from loaders.arguments import Parser, not_negative, positive, zero_or_more
from loaders.errors import UserError
from loaders.prep.demo import DEMO, or_demo
from loaders.text import available_cores
from loaders.writable import check_folder

_CONFIGS = str(Path(__file__).resolve().parent.parent / "configs" / "cifar10_{method}.yaml")
_CURVE = 20  # points of an accuracy curve


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; the exit code."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    return cli.command("evidence.py", lambda: _study(_parser().parse_all(given), given))


def _parser() -> Parser:
    parser = Parser("evidence.py", description="Run a study of CoCor and report it.", allow_abbrev=False)
    parser.add_argument("--study", required=True, choices=[*STUDIES, "methods"], help="what is compared")
    parser.add_argument("--data", type=Path, required=True, help="training images: class folders or a .beton file")
    parser.add_argument("--val-data", type=Path, help="held-out images for k-NN (default: the folder val beside train)")
    parser.add_argument("--linear", type=Path, metavar="DIR", help="also linear probes on DIR: train and test images")
    methods = get_args(Method)
    parser.add_argument("--methods", nargs="+", choices=methods, help="default: moco simsiam; for `methods` all five")
    parser.add_argument("--seeds", type=not_negative, nargs="+", default=[0, 1], help="default: 0 1")
    parser.add_argument("--epochs", type=positive, default=100, help="default: 100")
    parser.add_argument("--jobs", type=positive, default=1, help="runs at a time; they share the GPUs (default: 1)")
    parser.add_argument("--output", type=Path, default=Path("runs/evidence"), help="default: runs/evidence")
    parser.add_argument("--configs", default=_CONFIGS, metavar="FILE", help="default: configs/cifar10_{method}.yaml")
    parser.add_argument("--only", nargs="+", default=[], metavar="TEXT", help="only variants with one of these")
    parser.add_argument("--minutes", type=zero_or_more, help="stop after so long; the same command goes on from there")
    parser.add_argument("--gpus", type=not_negative, help="GPUs to spread the runs over (default: all; 0: the CPU)")
    parser.add_argument(
        "--report-only", action="store_true", help="train nothing, report what has been measured so far"
    )
    parser.add_argument("flags", nargs="*", metavar="-- FLAGS", help="flags of cocor-train for every run")
    return parser


def _study(options: argparse.Namespace, given: Sequence[str]) -> None:
    variants = _variants(options)
    shared = shared_flags(options.flags, variants)
    for name, values in (("--seeds", options.seeds), ("--methods", options.methods or [])):
        if len(set(values)) < len(values):  # equal runs would count as several, in one folder
            raise UserError(f"{name} {' '.join(map(str, values))}: names one twice")
    present = torch.cuda.device_count()
    gpus = present if options.gpus is None else options.gpus
    if not options.report_only:
        _check_paths(options)
        if gpus > present:
            raise UserError(f"--gpus {gpus}: have {present}; use {present} or fewer (0: the CPU)")
    deadline = None if options.minutes is None else time.monotonic() + 60 * options.minutes
    crew = Crew(options.jobs, gpus, deadline)
    equal = [_training(options, gpus, shared, *place) for place in _places(options, variants) if place[1].like is None]
    timed = [place for place in _places(options, variants) if place[1].like is not None]
    rows = _rows(_ended(options, crew, equal), variants)
    lengths = [_as_long(place, rows, options.epochs) for place in timed]
    if timed:
        longer = [
            _training(options, gpus, shared, *place, epochs=epochs)
            for place, epochs in zip(timed, lengths, strict=True)
            if epochs is not None
        ]
        rows += _rows(_ended(options, crew, longer), variants)
    _report(options, rows, given)
    _say_untimed(timed, lengths)
    if crew.failed:
        raise UserError("; ".join(f"{name}: {why}" for name, why in crew.failed.items()))
    if crew.stopped:
        print(f"{len(crew.stopped)} runs are not finished: the same command goes on")


def _check_paths(options: argparse.Namespace) -> None:
    """Report a missing path once, not from every run, and what the report lacks now, not after hours of training."""
    panels.check_picture(options.output / f"{options.study}.png")
    check_folder("--output", options.output)
    for name, path in (("--data", options.data), ("--val-data", options.val_data)):
        if path is not None and str(path) != DEMO and not path.exists():
            raise UserError(f"{name} {path}: no such folder or file; check the path")
    if options.linear is not None:
        try:
            open_splits(or_demo(options.linear))
        except UserError as error:
            raise UserError(f"--linear: {error}") from None


Place = tuple[str, Variant, int]


def _variants(options: argparse.Namespace) -> list[Variant]:
    study = STUDIES["cocor" if options.study == "methods" else options.study]
    chosen = [v for v in study if not options.only or any(_matches(text, v.key) for text in options.only)]
    if not chosen:
        raise UserError(
            f"--only {' '.join(options.only)}: no such variant; there are {', '.join(v.key for v in study)}"
        )
    keys = {variant.key for variant in chosen}
    lost = [v.key for v in chosen if v.like is not None and not {v.like, "plain"} <= keys]
    if lost:
        raise UserError(f"--only: {lost[0]} needs the variants it is timed by as well")
    return chosen


def _matches(text: str, key: str) -> bool:
    """Whether all parts of ``mmnn+5`` are in a variant's key; ``beta-1`` is not in ``tune-beta-16``."""
    return all(re.search(rf"{re.escape(part)}(?![0-9.])", key) for part in text.split("+"))


def _places(options: argparse.Namespace, variants: Sequence[Variant]) -> list[Place]:
    """All runs, seed by seed: a study that is stopped early is complete for some seeds, not for some variants. Within a
    seed the longest come first, so that at the end no GPU is left waiting for one of them."""
    methods = options.methods or (get_args(Method) if options.study == "methods" else ("moco", "simsiam"))
    longest_first = sorted(variants, key=lambda variant: variant.flags.get("consistency") == "none")
    return [(method, variant, seed) for seed in options.seeds for variant in longest_first for method in methods]


def _training(
    options: argparse.Namespace,
    gpus: int,
    shared: Flags,
    method: str,
    variant: Variant,
    seed: int,
    epochs: int | None = None,
) -> Training:
    """One run, with its flags checked: the study's, the variant's and those that all runs share."""
    file = Path(options.configs.replace("{method}", method))
    length = epochs or options.epochs
    flags: dict[str, Any] = {
        "config": file,
        "data": options.data,
        **({} if options.val_data is None else {"val_data": options.val_data}),
        "method": method,
        "epochs": length,
        "seed": seed,
        "gpus": min(gpus, 1),
        "workers": max(1, available_cores() // options.jobs),
        "knn_every": max(1, length // _CURVE),
        "checkpoint_every_epochs": max(1, length // 4),
        "keep_checkpoints": 1,
        **variant.flags,
    }
    flags |= shared
    folder = options.output / "runs" / f"{method}-{variant.key}-seed{seed}"
    checked = resolve.load([f"--{key.replace('_', '-')}={value}" for key, value in flags.items()])
    if not options.report_only and held_out_images(checked) is None:
        raise UserError(
            "--val-data: name held-out class folders, on which runs are compared by k-NN (--knn-every above 0)"
        )
    flags["batch_size"] = checked.batch_size
    free = FREE_TO_CHANGE - {"knn_k", "knn_temperature"}  # these two must be equal where runs are compared
    settings = {key: value for key, value in checked.to_dict().items() if key not in free}
    return Training(method, variant.key, seed, folder, flags, options.linear, settings)


def _as_long(place: Place, rows: Sequence[Row], epochs: int) -> int | None:
    """The epochs in which ``place`` takes as long as the variant that it is like, by the speeds of the runs with the
    same seed, so that more seeds do not change finished runs. None if one of these speeds has not been measured."""
    method, variant, seed = place
    rates = {
        row.variant: run.images_per_s
        for row in rows
        for run in row.runs
        if (row.method, run.training.seed) == (method, seed)
    }
    like, plain = rates.get(variant.like or "", math.nan), rates.get("plain", math.nan)
    return max(1, round(epochs * plain / like)) if math.isfinite(plain / like) else None


def _say_untimed(places: Sequence[Place], lengths: Sequence[int | None]) -> None:
    """Name the runs that a study leaves out."""
    left = [f"{m}-{v.key}-seed{s}" for (m, v, s), epochs in zip(places, lengths, strict=True) if epochs is None]
    if left:
        print(f"not run: {', '.join(left)}; the runs to be as long as have not ended, or logged no rate (--log-every)")


def _ended(options: argparse.Namespace, crew: Crew, trainings: Sequence[Training]) -> Sequence[Training]:
    """``trainings``, after running those that are not done. With ``--report-only`` those done before, each with the
    flags that it was run with, whatever the flags of the report."""
    if options.report_only:
        return [recorded for training in trainings if (recorded := training.as_recorded()) is not None]
    if not crew.stopped:
        crew.run(trainings)
    return trainings


def _rows(trainings: Sequence[Training], variants: Sequence[Variant]) -> list[Row]:
    """The finished runs, by method and variant."""
    titles = {variant.key: variant.title for variant in variants}
    groups: dict[tuple[str, str], list[Training]] = {}
    for training in trainings:
        if training.is_done():
            groups.setdefault((training.method, training.variant), []).append(training)
    return [
        Row(method, key, titles[key], [measured(training) for training in group])
        for (method, key), group in groups.items()
    ]


def _machines(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The machines on which the runs were trained; the report may be made on another one."""
    machines: list[dict[str, Any]] = []
    for training in (run.training for row in rows for run in row.runs):
        recorded = training.as_recorded()
        if recorded is not None and recorded.machine is not None and recorded.machine not in machines:
            machines.append(recorded.machine)
    return machines


def _report(options: argparse.Namespace, rows: list[Row], given: Sequence[str]) -> None:
    if not rows:
        print("nothing is finished yet")
        return
    methods, variants = get_args(Method), [variant.key for variant in _variants(options)]
    rows.sort(key=lambda row: (methods.index(row.method), variants.index(row.variant)))
    machines = _machines(rows)
    text = table(rows)
    command = shlex.join(["python", "benchmarks/evidence.py", *given])
    stem = options.output / options.study
    content = {
        "study": options.study,
        "command": command,
        "machine": machines[0] if len(machines) == 1 else machines,
        "runs": [run.to_dict() for row in rows for run in row.runs],
    }
    write_json(stem.with_suffix(".json"), content)
    lines = "\n".join(map(machine_line, machines)) or "the runs did not note their machine"
    atomic.write_text(stem.with_suffix(".md"), f"{text}\n\n{lines}\n\n    {command}\n")
    draw(rows, stem.with_suffix(".png"), clock=options.study == "clock")
    print(f"\n{text}\n\n{stem}.md, {stem}.json, {stem}.png")


if __name__ == "__main__":
    sys.exit(main())
