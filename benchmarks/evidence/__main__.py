"""Run a study of CoCor over several seeds; report accuracies and gains.

    D="--data cifar10/train --val-data cifar10/test"
    python -m benchmarks.evidence --study core $D --linear cifar10 --seeds 0 1 --epochs 100 --jobs 4
    python -m benchmarks.evidence --study tune $D --methods moco --seeds 0 --epochs 20 --only plain centre beta
    python -m benchmarks.evidence --study core $D -- --batch-size 256 --lr 0.03

Each variant (studies.py) of each method is trained from ``configs/cifar10_METHOD.yaml`` (or ``--configs``) for every
seed. The same command continues a study that was stopped. Results, in ``--output``: STUDY.json (all curves), STUDY.md
(the table), STUDY.png. k-NN accuracy (k = 200, at most 20,000 training and 5,000 held-out images) is that after the
last epoch, the linear probe's top-1 on all test images. Gains are over the plain method of the same seed; of three
seeds and more with 95 % t interval and p value. Minutes are those of training alone and depend on what else runs on
the GPU.
"""

import argparse
import itertools
import math
import re
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import command, machine_line, write_json, write_text
from benchmarks.evidence.report import Run, draw, measured, table
from benchmarks.evidence.runner import STOPPED, Training, run_all
from benchmarks.evidence.studies import STUDIES, Flags, Variant
from cocor.config import parse, resolve
from cocor.config.options import FREE_TO_CHANGE, Config
from cocor.data import held_out_images
from cocor.eval.datasets.splits import open_splits
from cocor.methods import METHODS
from cocor.panels import check_picture
from loaders.arguments import Parser, not_negative, positive, zero_or_more
from loaders.cpus import available_cores
from loaders.errors import UserError
from loaders.open import open_images
from loaders.prep.demo import or_demo

_CONFIGS = str(Path(__file__).resolve().parents[2] / "configs" / "cifar10_{method}.yaml")
WAITS = "waits for those that it is timed by"
_CURVE = 20  # points of an accuracy curve
_OWN = {"config", "data", "val_data", "method", "seed", "epochs", "gpus", "output", "resume", "overwrite", "dry_run",
        "profile"}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    given = sys.argv[1:] if argv is None else list(argv)
    return command("evidence", lambda: study(parser().parse_all(given), given))


def parser() -> Parser:
    result = Parser("evidence", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add, methods = result.add_argument, tuple(METHODS)
    add("--study", required=True, choices=[*STUDIES, "methods"], help="what is compared")
    add("--data", type=Path, required=True, help="training images: class folders or a .beton file")
    add("--val-data", type=Path, help="held-out images for k-NN (default: the folder val beside train)")
    add("--linear", type=Path, metavar="DIR", help="also linear probes on DIR: train and test images")
    add("--invariance", type=Path, metavar="DIR", help="also what is kept of changes of the images in DIR")
    add("--methods", nargs="+", choices=methods, help="default: moco simsiam; for `methods` all")
    add("--seeds", type=not_negative, nargs="+", default=[0, 1], help="default: 0 1")
    add("--epochs", type=positive, default=100, help="default: 100")
    add("--jobs", type=positive, default=1, help="runs at a time; they share the GPUs (default: 1)")
    add("--output", type=Path, default=Path("runs/evidence"), help="default: runs/evidence")
    add("--configs", default=_CONFIGS, metavar="FILE", help="default: configs/cifar10_{method}.yaml")
    add("--only", nargs="+", default=[], metavar="TEXT", help="only these variants, or those with it in their name")
    add("--minutes", type=zero_or_more, help="stop after so long; the same command goes on from there")
    add("--gpus", type=not_negative, help="GPUs to spread the runs over (default: all; 0: the CPU)")
    add("--report-only", action="store_true", help="train nothing, report what has been measured so far")
    add("flags", nargs="*", metavar="-- FLAGS", help="flags of cocor-train for every run")
    return result


def study(options: argparse.Namespace, given: Sequence[str]) -> None:
    variants, gpus = variants_of(options), torch.cuda.device_count() if options.gpus is None else options.gpus
    shared, runs, unfinished = shared_flags(options.flags, variants), list[Run](), dict[str, str]()
    methods = options.methods or (tuple(METHODS) if options.study == "methods" else ("moco", "simsiam"))
    if not options.report_only:  # what would fail after hours of training
        check_picture(options.output / f"{options.study}.png")
        if options.linear is not None:
            open_splits(or_demo(options.linear))
        if options.invariance is not None:
            open_images(or_demo(options.invariance))
    deadline = time.monotonic() + 60 * (math.inf if options.minutes is None else options.minutes)
    # Seed by seed, so that what is stopped early is complete for some; in the study's order, which begins with the
    # plain method, where it has that.
    places = list(itertools.product(dict.fromkeys(options.seeds), variants, dict.fromkeys(methods)))
    for timed in (False, True):  # at equal epochs, then as long as one of those
        trainings = []
        for seed, variant, method in (place for place in places if (place[1].like is not None) == timed):
            epochs = epochs_as_long(method, variant, seed, runs, options.epochs) if timed else options.epochs
            if epochs is None:
                unfinished[f"{method}-{variant.key}-seed{seed}"] = WAITS
            else:
                trainings.append(training(options, gpus, shared, method, variant, seed, epochs))
        if trainings and not options.report_only and STOPPED not in unfinished.values():
            unfinished |= run_all(trainings, options.jobs, gpus, deadline)
        runs += [measured(one) for one in trainings if (one.record() if options.report_only else one.is_done())]
    report(options, runs, [variant.key for variant in variants], given)
    for name, why in unfinished.items():
        print(f"{name} is not finished: {why}; the same command goes on")
    if set(unfinished.values()) - {STOPPED, WAITS}:
        raise UserError("; ".join(f"{name}: {why}" for name, why in unfinished.items()))


def variants_of(options: argparse.Namespace) -> list[Variant]:
    """Choose the variants of a study by ``--only``."""
    variants = STUDIES["cocor" if options.study == "methods" else options.study]
    names = {variant.key for variant in variants}

    def matches(text: str, key: str) -> bool:  # a whole key, or all parts of mmnn+5; beta-1 is not in tune-beta-16
        if text in names:
            return text == key
        return all(re.search(rf"{re.escape(part)}(?![0-9.])", key) for part in text.split("+"))

    chosen = [v for v in variants if not options.only or any(matches(text, v.key) for text in options.only)]
    keys, known = {variant.key for variant in chosen}, ", ".join(variant.key for variant in variants)
    if not chosen:
        raise UserError(f"--only {' '.join(options.only)}: no such variant; there are {known}")
    for variant in chosen:
        if variant.like is not None and not {variant.like, "plain"} <= keys:
            raise UserError(f"--only: {variant.key} needs the variants it is timed by as well")
    return chosen


def shared_flags(words: Sequence[str], variants: Sequence[Variant]) -> Flags:
    """Parse ``--lr 0.1 --no-sync-bn``. UserError for flags that a study sets."""
    known = parse.parser(Config, "cocor-train", "", {}, {}, {})
    parse.read_flags(Config, known, words)  # checks them
    flags = {key: value for key, value in vars(known.parse_args(words)).items() if value != []}
    setters = {key: f"the variant {variant.key}" for variant in variants for key in variant.flags}
    setters |= dict.fromkeys(_OWN, "the study")
    for key in flags.keys() & setters.keys():
        raise UserError(f"{parse.flag(key)} behind the --: {setters[key]} sets it; leave it out")
    return flags


def training(
    options: argparse.Namespace, gpus: int, shared: Flags, method: str, variant: Variant, seed: int, epochs: int
) -> Training:
    """Set up one run and check its flags."""
    flags: dict[str, Any] = {
        "config": Path(options.configs.replace("{method}", method)), "method": method, "epochs": epochs, "seed": seed,
        "data": options.data, **({} if options.val_data is None else {"val_data": options.val_data}),
        "gpus": min(gpus, 1), "workers": max(1, available_cores() // options.jobs), "keep_checkpoints": 1,
        "knn_every": max(1, epochs // _CURVE), "checkpoint_every_epochs": max(1, epochs // 4),
        **variant.flags, **shared,
    }  # fmt: skip
    checked = resolve.load([f"{parse.flag(key)}={value}" for key, value in flags.items()])
    if not options.report_only and held_out_images(checked) is None:
        raise UserError("--val-data: name held-out class folders, on which runs are compared by k-NN (--knn-every)")
    flags["batch_size"] = checked.batch_size
    free = FREE_TO_CHANGE - {"data", "val_data", "knn_k", "knn_temperature"}  # where runs are compared
    settings = {key: value for key, value in checked.to_dict().items() if key not in free}
    folder = options.output / "runs" / f"{method}-{variant.key}-seed{seed}"
    probes = {"linear": options.linear, "invariance": options.invariance}
    given = {name: data for name, data in probes.items() if data is not None}
    return Training(method, variant, seed, folder, flags, settings, given)


def epochs_as_long(method: str, variant: Variant, seed: int, runs: Sequence[Run], epochs: int) -> int | None:
    """Return epochs that take as long as ``variant.like``, by speeds of the same seed."""
    rates = {run["variant"]: run["images_per_s"] for run in runs if (run["method"], run["seed"]) == (method, seed)}
    ratio = rates.get("plain", math.nan) / rates.get(variant.like, math.nan)
    return max(1, round(epochs * ratio)) if math.isfinite(ratio) else None


def report(options: argparse.Namespace, runs: list[Run], keys: list[str], given: Sequence[str]) -> None:
    """Write numbers, table and picture."""
    if not runs:
        print("nothing is finished yet")
        return
    methods, stem = tuple(METHODS), options.output / options.study
    runs.sort(key=lambda run: (methods.index(run["method"]), keys.index(run["variant"])))
    text, words = table(runs), shlex.join(["python", "-m", "benchmarks.evidence", *given])
    write_json(stem.with_suffix(".json"), {"study": options.study, "command": words, "runs": runs})
    machines = dict.fromkeys(machine_line(run["machine"]) for run in runs)
    write_text(stem.with_suffix(".md"), "\n".join([text, "", *machines, "", f"    {words}", ""]))
    draw(runs, stem.with_suffix(".png"), clock=options.study in ("clock", "cheap"))
    print(f"\n{text}\n\n{stem}.md, {stem}.json, {stem}.png")


if __name__ == "__main__":
    sys.exit(main())
