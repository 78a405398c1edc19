"""Run ``cocor-eval``: probes of an encoder's frozen features, and fine-tuning.

    cocor-eval linear runs/moco --data data/cifar10
    cocor-eval transfer runs/moco runs/moco_cocor --datasets all --root data

Weights may be of any origin. Numbers go to the terminal and, with the picture, to ``--output``. Under torchrun ranks
share the encoding and the search for neighbours; solvers run on the main rank alone, except in ``transfer``, where
every rank solves the same probe to stay in step. Exit codes: 0 done, 2 a user's mistake, 130 interrupted.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from cocor import cli
from cocor.eval.datasets.protocols import FINETUNE, KNN_K, KNN_TEMPERATURE, PROTOCOLS, SHOT_SEEDS, SHOTS, TASKS, WAYS
from cocor.eval.detect.recipe import add_flags as detect_flags
from cocor.run_dir import check_pair
from loaders.arguments import (
    Parser,
    a_channel,
    above_zero,
    fraction,
    image_size,
    not_negative,
    positive,
    seed,
    share,
    two_or_more,
    workers,
)
from loaders.files import user_cache

Commands = Any  # argparse's set of subcommands, whose class has no public name

_NAMES = ", ".join(PROTOCOLS)
_METRIC = "chooses the penalty (default: the protocol's)"
_SEVERAL = "for several encoders side by side"
_WEIGHTS = "a run's folder, a file of weights of any origin, timm:NAME or random:NAME"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Returns the exit code."""
    given = sys.argv[1:] if arguments is None else arguments
    return cli.command("cocor-eval", lambda: _run(_parser().parse_all(given)))


def _run(options: argparse.Namespace) -> None:
    check_pair()
    from cocor.eval import commands

    run: Callable[[argparse.Namespace], None] = getattr(commands, options.command)
    commands.on_device(options, run)


def _parser() -> Parser:
    parser = Parser(
        "cocor-eval", description="Evaluate an encoder: its frozen features, or a fine-tuned copy.", allow_abbrev=False
    )
    add = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")
    for command in (_linear, _knn, _fewshot, _finetune, _retrieval, _neighbours, _embed, _compared, _detect, _transfer):
        command(add)
    return parser


def _linear(add: Commands) -> None:
    linear = _command(add, "linear", "linear probe: L-BFGS over 45 penalties, chosen on val, tested once")
    _data(linear)
    probes = ["lbfgs", "moco", "simsiam"]
    linear.add_argument("--probe", choices=probes, default="lbfgs", help="SGD for ImageNet's size")
    linear.add_argument("--metric", choices=["top1", "class-mean"], help=_METRIC)
    linear.add_argument("--iterations", type=positive, help="most of one fit (default 1000)")
    views = "SGD: random crops, encoded anew in every epoch as in the sources, or cached features (default crops)"
    linear.add_argument("--learn-from", choices=["crops", "features"], help=views)
    linear.add_argument("--epochs", type=positive, help="SGD: fewer or more than the recipe's 100 or 90")


def _knn(add: Commands) -> None:
    knn = _command(add, "knn", "weighted k-nearest neighbours")
    _data(knn)
    knn.add_argument("--k", type=positive, nargs="+", help=f"neighbours (default {_list(KNN_K)}, as the bank allows)")
    knn.add_argument("--temperature", type=above_zero, default=KNN_TEMPERATURE, help="of the votes (default 0.07)")
    knn.add_argument("--leave-one-out", action="store_true", help="every image against all others of its set")


def _fewshot(add: Commands) -> None:
    fewshot = _command(add, "fewshot", "a few images a class: n-shot probes and N-way tasks")
    _data(fewshot)
    counts = f"images a class (default {_list(SHOTS)})"
    fewshot.add_argument("--shots", type=positive, nargs="+", default=list(SHOTS), help=counts)
    fewshot.add_argument("--seeds", type=positive, default=SHOT_SEEDS, help="draws of the shots (default 5)")
    fewshot.add_argument("--tasks", type=not_negative, default=TASKS, help="N-way tasks; 0: none (default 2000)")
    fewshot.add_argument("--ways", type=two_or_more, default=WAYS, help="classes of a task (default 5)")
    fewshot.add_argument("--metric", choices=["top1", "class-mean"], help=_METRIC)


def _finetune(add: Commands) -> None:
    finetune = _command(add, "finetune", "train the whole network with all or a few of the labels")
    _data(finetune)
    part = f"share of every class (default {_list(FINETUNE.fractions)}: one training each)"
    finetune.add_argument("--label-fraction", type=fraction, nargs="+", default=list(FINETUNE.fractions), help=part)
    epochs = f"default {FINETUNE.epochs(0.01)} up to 1 %% of the labels, else {FINETUNE.epochs(1.0)}"
    finetune.add_argument("--epochs", type=positive, help=epochs)
    rate = f"learning rate of a batch of 256 (default {FINETUNE.lr})"
    finetune.add_argument("--lr", type=above_zero, default=FINETUNE.lr, help=rate)
    finetune.add_argument("--head-lr", type=above_zero, help="of the classifier (default: --lr)")
    finetune.add_argument("--seed", type=seed, default=0, help="of order, crops, and which labels (default 0)")
    finetune.add_argument("--resume", action="store_true", help="continue from the checkpoints in --output")
    finetune.set_defaults(precision=None)


def _retrieval(add: Commands) -> None:
    retrieval = _command(add, "retrieval", "nearest neighbours of query images as a contact sheet")
    _data(retrieval)
    retrieval.add_argument("--queries", type=positive, default=8, help="rows of the sheet (default 8)")
    retrieval.add_argument("--neighbours", type=positive, default=8, help="columns of the sheet (default 8)")
    retrieval.add_argument("--seed", type=seed, default=0, help="another seed shows other queries (default 0)")


def _neighbours(add: Commands) -> None:
    neighbours = _command(add, "neighbours", "nearest neighbours of one image, listed and as a contact sheet")
    what = "a file, or the name of one of the images in --data"
    neighbours.add_argument("image", metavar="IMAGE", help=what)
    _data(neighbours)
    neighbours.add_argument("--neighbours", type=positive, default=8, help="how many (default 8)")


def _embed(add: Commands) -> None:
    embed = _command(add, "embed", "write features, names and labels to a file")
    _data(embed)
    how = "draw them in a plane, in colours of their classes; umap needs umap-learn"
    embed.add_argument("--picture", choices=["tsne", "umap"], help=how)


def _compared(add: Commands) -> None:
    """Add the commands that look into several encoders side by side."""
    what = f"similarity of composites by length and augmentation, {_SEVERAL}"
    consistency = _command(add, "consistency", what, True)
    _data(consistency)
    consistency.add_argument("--images", type=positive, default=2000, help="images to look at (default 2000)")
    consistency.add_argument("--seed", type=seed, default=0, help="of the views (default 0)")

    what = f"what features keep: augmentations, hue, orientation, {_SEVERAL}"
    invariance = _command(add, "invariance", what, True)
    _data(invariance)
    invariance.add_argument("--images", type=positive, default=4000, help="images to look at (default 4000)")
    invariance.add_argument("--seed", type=seed, default=0, help="of the views and of who is tested (default 0)")

    spectrum = _command(add, "spectrum", f"singular values and effective rank of the features, {_SEVERAL}", True)
    _data(spectrum)
    spectrum.add_argument("--raw", action="store_true", help="features as they are (default: of unit length)")


def _detect(add: Commands) -> None:
    what = "object detection: Faster R-CNN, fine-tuned as in the paper"
    detect = add.add_parser("detect", help=what, description=what, allow_abbrev=False)
    detect.add_argument("weights", nargs=1, metavar="WEIGHTS", help=_WEIGHTS)
    add_encoder_flags(detect)
    detect_flags(detect)


def _transfer(add: Commands) -> None:
    transfer = _command(add, "transfer", f"the paper's table of linear probes, {_SEVERAL}", True)
    transfer.add_argument("--datasets", nargs="+", default=["all"], metavar="NAME", help=f"all, or of {_NAMES}")
    transfer.add_argument("--root", type=Path, required=True, metavar="DIR", help="the folder that the sets lie in")
    transfer.add_argument("--iterations", type=positive, default=1000, help="most of one fit (default 1000)")


def add_encoder_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that choose among encoders, or name what weights do not tell."""
    which = "the trained encoder or its moving average"
    parser.add_argument("--which", choices=["online", "ema"], default="online", help=which)
    parser.add_argument("--backbone", metavar="NAME", help="timm's name, where the weights do not tell")
    parser.add_argument("--stem", choices=["imagenet", "small"], help="first layers, where the weights do not tell")
    usual = "default: what a run or timm tells, else ImageNet's"
    text = f"of pixels from 0 to 1, to normalise them: a value a channel, with commas, or one ({usual})"
    parser.add_argument("--mean", type=a_channel(share), metavar="FLOAT,...", help=text)
    parser.add_argument("--std", type=a_channel(fraction), metavar="FLOAT,...", help="their standard deviation")


def _command(add: Commands, name: str, text: str, several: bool = False) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = add.add_parser(name, help=text, description=text, allow_abbrev=False)
    parser.add_argument("weights", nargs="+" if several else 1, metavar="WEIGHTS", help=_WEIGHTS)
    add_encoder_flags(parser)
    if name == "embed":
        where = ".parquet, .npz or .zarr (default: eval/RUN/DATA/features.npz)"
        parser.add_argument("--output", type=Path, metavar="FILE", help=where)
    else:
        usual = "eval/RUN" if name == "transfer" else "eval/RUN/DATA"
        parser.add_argument("--output", type=Path, metavar="DIR", help=f"for numbers and pictures (default: {usual})")
    how = parser.add_argument_group("features")
    crops = "default: the protocol's; ten: for training images only"
    how.add_argument("--crop", choices=["full", "central", "ten"], help=crops)
    how.add_argument("--filter", choices=["bicubic", "bilinear"], help="of the resize (default: the protocol's)")
    how.add_argument("--image-size", type=image_size, help="side in pixels (default: as in training, else 224)")
    how.add_argument("--loader", choices=["dali", "torch"], help="default: dali on a GPU, torch without")
    how.add_argument("--gpu", choices=["yes", "no"], help="default: if there is one")
    precision = f"of the encoder (default {'bf16 on a GPU, else fp32' if name == 'finetune' else 'fp32'})"
    how.add_argument("--precision", choices=["fp32", "bf16"], default="fp32", help=precision)
    how.add_argument("--batch-size", type=positive, default=256, help="default 256")
    how.add_argument("--workers", type=workers, help="CPU threads or processes of the loader (default: one a core)")
    cache = user_cache() / "eval"
    how.add_argument("--cache", type=Path, default=cache, help="of features (default ~/.cache/cocor/eval)")
    return parser


def _data(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("data: a folder of one's own, or a known set below a root")
    layout = "holds train/CLASS/... and test/CLASS/... (or val, or .beton); demo: those of configs/demo.yaml"
    group.add_argument("--data", type=Path, metavar="DIR", help=layout)
    on_error = "unusable files of --data: stop, or leave out"
    group.add_argument("--on-error", choices=["stop", "skip"], default="stop", help=on_error)
    group.add_argument("--dataset", metavar="NAME", help=_NAMES)
    group.add_argument("--root", type=Path, metavar="DIR", help="the folder that --dataset lies in")


def _list(numbers: Sequence[float]) -> str:
    return " ".join(f"{number:g}" for number in numbers)


if __name__ == "__main__":
    sys.exit(main())
