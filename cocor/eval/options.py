"""Turn flags into encoders, data sets and features; check what needs no features."""

import argparse
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from cocor.eval.datasets.protocols import PROTOCOLS, TRANSFER, VIEWS, WAY_SHOTS
from cocor.eval.datasets.splits import Splits, open_named, open_splits
from cocor.eval.embeddings import check_output
from cocor.eval.features import Extraction, Features, features_of
from cocor.eval.probes.consistency import Subject
from cocor.eval.probes.fewshot import check_shots, check_ways
from cocor.eval.probes.linear import check_splits
from cocor.weights.load import Encoder, load_encoder
from loaders.arguments import nearest
from loaders.datasets.beton import is_beton
from loaders.datasets.dataset import ImageDataset
from loaders.datasets.decode import Header, describe
from loaders.datasets.labels import NameLookup
from loaders.datasets.layout import SPLITS, TRAIN
from loaders.datasets.size_index import inspect
from loaders.errors import UserError
from loaders.files import check_folder
from loaders.open import open_images

Named = TypeVar("Named", Encoder, Subject)


def check_writable(args: argparse.Namespace) -> None:
    """Raise UserError, before any work, if results or features cannot be written."""
    if args.command == "embed" and args.output is not None:
        check_output(args.output)
    else:
        check_folder("--output", args.output or Path("eval"))
    if "cache" in args:
        check_folder("--cache", args.cache)


def check_one_process(args: argparse.Namespace) -> None:
    """Raise UserError under torchrun, for commands that share no work among ranks."""
    if args.world.size > 1:
        raise UserError(f"{args.command} runs in one process; start it without torchrun")


def chosen_splits(args: argparse.Namespace) -> Splits:
    """Open the splits that ``--data``, or ``--dataset`` and ``--root``, name."""
    if (args.data is None) == (args.dataset is None):
        raise UserError("name the images: --data DIR, or --dataset NAME --root DIR")
    if args.data is not None:
        return open_splits(args.data, args.workers, args.on_error)
    if args.dataset not in PROTOCOLS:
        raise UserError(f"--dataset {args.dataset}: no such set{nearest(args.dataset, PROTOCOLS)}")
    if args.root is None:
        raise UserError(f"--root: name the folder that {args.dataset} lies in")
    return open_named(args.dataset, args.root, args.cache, args.workers)


def chosen_datasets(words: Sequence[str]) -> list[str]:
    """Expand ``--datasets``: ``all`` are the ten of the paper's transfer table."""
    names: list[str] = []
    for word in ",".join(words).split(","):
        if word != "all" and word not in PROTOCOLS:
            known = ", ".join(PROTOCOLS)
            raise UserError(f"--datasets {word}: no such set{nearest(word, PROTOCOLS)}; known are {known}")
        names += TRANSFER if word == "all" else [word]
    return list(dict.fromkeys(names))


def chosen_images(args: argparse.Namespace) -> ImageDataset:
    """Open images to look at: the test split, or a folder or file without splits."""
    refuse_ten_crops(args)
    if args.data is not None and args.dataset is None:
        bare = args.data.is_dir() and {path.stem for path in args.data.iterdir()}.isdisjoint(TRAIN)
        if bare or is_beton(args.data):
            return open_images(args.data, on_error=args.on_error, workers=args.workers)
    return chosen_splits(args).test


def chosen_query(image: str, dataset: ImageDataset) -> tuple[ImageDataset, int | None]:
    """Open ``image``, a file or a name in ``dataset``; and its place there, if it is one of its images."""
    path = os.path.abspath(image)  # noqa: PTH100 (resolve() names what a link leads to)
    place = dataset.paths.index(path) if path in dataset.paths else NameLookup(dataset.names).find(image)
    if place is not None:
        return dataset.subset([place]), place
    if not Path(image).is_file():
        raise UserError(f"{image}: no such file, nor an image of --data by that name")
    found = inspect(path)
    if not isinstance(found, Header):
        raise UserError(f"{image}: {describe(found)}")
    label, sizes, plain = np.array([-1]), np.array([[found.height, found.width]], np.int32), np.array([found.plain])
    return ImageDataset(Path(path).parent, [Path(path).name], label, [], sizes, plain), None


def refuse_ten_crops(args: argparse.Namespace) -> None:
    """Raise UserError for ten crops where nothing is learned from them."""
    if args.crop == "ten":
        raise UserError("--crop ten: for training images, and this learns from none; leave it out")


def data_name(args: argparse.Namespace) -> str:
    """Name the images by set, folder or file, so that results keep apart.

    A split, such as ``tiny/val``, is called by the folder above as well.
    """
    if getattr(args, "dataset", None) is not None:
        return str(args.dataset)
    if getattr(args, "data", None) is None:
        return ""
    place = Path(os.path.abspath(args.data))  # noqa: PTH100 (resolve() names what a link leads to)
    name = place.stem if is_beton(place) else place.name
    return f"{place.parent.name}-{name}" if name.lower() in SPLITS else name


def encoder_hints(args: argparse.Namespace) -> dict[str, Any]:
    """Return what the flags say of encoders, as :func:`load_encoder` takes it."""
    return {"which": args.which, "architecture": args.backbone, "stem": args.stem, "mean": args.mean, "std": args.std}


def chosen_encoder(args: argparse.Namespace, weights: str) -> Encoder:
    """Load the encoder in ``weights``; the main rank prints a line about it."""
    found = load_encoder(weights, **encoder_hints(args))
    if args.world.main:
        print(found.describe())
    return found


def chosen_encoders(args: argparse.Namespace) -> list[Encoder]:
    """Load all of ``WEIGHTS``, under names that differ."""
    return distinct([chosen_encoder(args, weights) for weights in args.weights])


def distinct(found: Sequence[Named]) -> list[Named]:
    """Add a number to the ``name`` of the second and later ones of a name."""
    names = [one.name for one in found]
    counts = [names[:at].count(name) + 1 for at, name in enumerate(names)]
    return [one if n == 1 else replace(one, name=f"{one.name} ({n})") for one, n in zip(found, counts, strict=True)]


def extraction(args: argparse.Namespace, encoder: Encoder) -> Extraction:
    """Set how features are computed: as the protocol says, unless flags do."""
    gpu = args.world.device.type == "cuda"
    view = VIEWS[args.probe if args.command == "linear" else args.command]
    return Extraction(
        crop="central" if args.crop == "ten" else args.crop or view.crop, filter=args.filter or view.filter,
        size=args.image_size or encoder.image_size, loader=args.loader or ("dali" if gpu else "torch"),
        precision=torch.bfloat16 if args.precision == "bf16" else torch.float32, batch_size=args.batch_size,
        workers=args.workers, cache=args.cache, world=args.world, on_error=getattr(args, "on_error", "stop"),
    )  # fmt: skip


def features_of_splits(
    args: argparse.Namespace, encoder: Encoder, splits: Splits, learn_from_val: bool = False
) -> tuple[Features, Features, Features]:
    """Compute the features of the three splits.

    ``--crop ten`` is for training images and, if ``learn_from_val``, validation images; others give central crops.
    """
    looking = extraction(args, encoder)
    learning = replace(looking, crop="ten") if args.crop == "ten" else looking
    for_val = learning if learn_from_val else looking
    both, counts = splits.learned_from(), [len(splits.train), len(splits.val)]
    if for_val == learning and len(both) == sum(counts):  # one loader for both, as its start takes seconds
        whole = features_of(encoder, both, learning, "training and validation images")
        train, val = map(Features, whole.values.split(counts), whole.labels.split(counts))
    else:
        train = features_of(encoder, splits.train, learning, "training images")
        val = features_of(encoder, splits.val, for_val, "validation images")
    return train, val, features_of(encoder, splits.test, looking, "test images")


def check_probe(splits: Splits, validates: bool = True) -> None:
    """Raise UserError unless a linear probe can learn from the splits and be tested."""
    train, val = _labels(splits.train), _labels(splits.val)
    both = torch.cat([train, val])
    check_splits(train if validates else both, val if validates else both, _labels(splits.test))


def check_fewshot(args: argparse.Namespace, splits: Splits) -> None:
    """Raise UserError unless there are images enough for all shots and tasks."""
    pool = torch.cat([_labels(splits.train), _labels(splits.val)])
    check_splits(pool, pool, _labels(splits.test))
    for count in args.shots:
        check_shots(pool, count, splits.train.classes)
    for count in WAY_SHOTS if args.tasks else ():
        check_ways(_labels(splits.test), count, args.ways)


def check_knn(args: argparse.Namespace, splits: Splits) -> None:
    """Raise UserError unless the bank holds ``--k`` neighbours for the test images."""
    train, val = _known(splits.train), _known(splits.val)
    most = len(train) * (10 if args.crop == "ten" else 1) + len(val)
    _check_bank(args, torch.cat([train, val]), most, len(_known(splits.test)))


def check_leave_one_out(args: argparse.Namespace, dataset: ImageDataset) -> None:
    """Check as :func:`check_knn` does, where every image is classified by all others."""
    labels = _known(dataset)
    _check_bank(args, labels, len(labels) - 1, len(labels))


def _check_bank(args: argparse.Namespace, labels: Tensor, most: int, queries: int) -> None:
    if most < 1 or not queries:
        raise UserError("k-NN needs images with labels in the bank and among the queries")
    if len(labels.unique()) < 2:
        raise UserError("all images of the bank are of 1 class; k-NN needs two or more class folders")
    if too_large := [k for k in args.k or () if k > most]:
        raise UserError(f"--k {too_large[0]}: the bank holds {most:,} images; use {most} or fewer")


def _labels(dataset: ImageDataset) -> Tensor:
    return torch.from_numpy(dataset.labels.copy())


def _known(dataset: ImageDataset) -> Tensor:
    labels = _labels(dataset)
    return labels[labels >= 0]
