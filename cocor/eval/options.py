"""From the flags of ``cocor-eval`` to encoders, data sets and features."""

import argparse
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from cocor.eval.datasets.protocols import PROTOCOLS, TRANSFER, VIEWS
from cocor.eval.datasets.splits import Splits, open_named, open_splits
from cocor.eval.features import Extraction, Features, features_of, features_of_two
from cocor.eval.weights.load import Encoder, load_encoder
from loaders.arguments import nearest
from loaders.datasets.beton import is_beton
from loaders.datasets.dataset import ImageDataset
from loaders.datasets.layout import SPLITS, TRAIN
from loaders.errors import UserError
from loaders.files import check_folder
from loaders.open import open_images


def chosen_splits(options: argparse.Namespace) -> Splits:
    """The splits that ``--data``, or ``--dataset`` and ``--root``, name."""
    if (options.data is None) == (options.dataset is None):
        raise UserError("name the images: --data DIR, or --dataset NAME --root DIR")
    if options.data is not None:
        return open_splits(options.data, options.workers, options.on_error)
    if options.dataset not in PROTOCOLS:
        raise UserError(f"--dataset {options.dataset}: no such set{nearest(options.dataset, PROTOCOLS)}")
    if options.root is None:
        raise UserError(f"--root: name the folder that {options.dataset} lies in")
    return open_named(options.dataset, options.root, options.cache, options.workers)


def chosen_datasets(words: Sequence[str]) -> list[str]:
    """The names behind ``--datasets``: ``all`` are the ten of the paper's transfer table."""
    names: list[str] = []
    for word in ",".join(words).split(","):
        if word == "all":
            names += TRANSFER
        elif word in PROTOCOLS:
            names.append(word)
        else:
            raise UserError(
                f"--datasets {word}: no such set{nearest(word, PROTOCOLS)}; known are {', '.join(PROTOCOLS)}"
            )
    return list(dict.fromkeys(names))


def images_to_look_at(options: argparse.Namespace) -> ImageDataset:
    """Images to look at without learning: the test split, or the folder or file itself if it holds no splits."""
    refuse_ten_crops(options)
    if options.data is not None and options.dataset is None:
        if is_beton(options.data):
            return open_images(options.data)
        inside = {path.stem for path in options.data.iterdir()} if options.data.is_dir() else set()
        if options.data.is_dir() and inside.isdisjoint(TRAIN):
            return open_images(options.data, on_error=options.on_error, workers=options.workers)
    return chosen_splits(options).test


def refuse_ten_crops(options: argparse.Namespace) -> None:
    """UserError where ten crops are asked for and nothing is learned that they could help."""
    if options.crop == "ten":
        raise UserError("--crop ten: for training images, and this learns from none; leave it out")


def name_of_data(options: argparse.Namespace) -> str:
    """How to tell results on these images from those on others: the data set's name, or the folder's or file's; that of
    a split, such as ``tiny/val``, with the folder it lies in. "" for ``transfer``, which has a table of all sets."""
    if getattr(options, "dataset", None) is not None:
        return str(options.dataset)
    if getattr(options, "data", None) is None:
        return ""
    place = Path(os.path.abspath(options.data))  # noqa: PTH100 (resolve() names what a link leads to)
    name = place.stem if is_beton(place) else place.name
    return f"{place.parent.name}-{name}" if name.lower() in SPLITS else name


def check_writable(options: argparse.Namespace) -> None:
    """UserError, naming the flag, if results or features cannot be written; called before any work."""
    check_folder("--output", options.output or Path("eval"))
    check_folder("--cache", options.cache)


def chosen_encoder(options: argparse.Namespace, weights: str) -> Encoder:
    """The encoder in ``weights``, one of ``WEIGHTS``; the main rank prints a line about it."""
    found = load_encoder(weights, which=options.which, architecture=options.backbone, stem=options.stem)
    if options.world.main:
        print(found.describe())
    return found


def chosen_encoders(options: argparse.Namespace) -> list[Encoder]:
    """All of ``WEIGHTS``, under names that differ."""
    found = [chosen_encoder(options, weights) for weights in options.weights]
    names = distinct([encoder.name for encoder in found])
    return [replace(encoder, name=name) for encoder, name in zip(found, names, strict=True)]


def distinct(names: Sequence[str]) -> list[str]:
    """``names`` with a number behind the second and later uses of each."""
    return [f"{name} ({names[:at].count(name) + 1})" if name in names[:at] else name for at, name in enumerate(names)]


def extraction(options: argparse.Namespace, encoder: Encoder) -> Extraction:
    """How features are computed: as the protocol says, unless flags do. ``--crop ten`` counts as central here."""
    gpu = options.world.device.type == "cuda"
    view = VIEWS[probe_of(options)]
    return Extraction(
        crop="central" if options.crop == "ten" else options.crop or view.crop,
        filter=options.filter or view.filter,
        size=options.image_size or encoder.image_size,
        loader=options.loader or ("dali" if gpu else "torch"),
        precision=torch.bfloat16 if options.precision == "bf16" else torch.float32,
        batch_size=options.batch_size,
        workers=options.workers,
        cache=options.cache,
        world=options.world,
    )


def probe_of(options: argparse.Namespace) -> str:
    """The key of a command's row in :data:`cocor.eval.datasets.protocols.VIEWS`."""
    return str(options.probe if options.command == "linear" else options.command)


def features_of_splits(
    options: argparse.Namespace, encoder: Encoder, splits: Splits, val_crop: str | None = None
) -> tuple[Features, Features, Features]:
    """Features of the three splits. ``--crop ten`` is for training images; the others give central crops, but with
    ``val_crop`` "ten" validation images, which are then learned from as well, give ten too."""
    looking = extraction(options, encoder)
    learning = replace(looking, crop="ten") if options.crop == "ten" else looking
    val_how = learning if val_crop == "ten" else looking
    if val_how == learning:
        train, val = features_of_two(encoder, splits.train, splits.val, splits.learned_from(), learning)
        return train, val, features_of(encoder, splits.test, looking, "test images")
    return (
        features_of(encoder, splits.train, learning, "training images"),
        features_of(encoder, splits.val, val_how, "validation images"),
        features_of(encoder, splits.test, looking, "test images"),
    )
