"""Build loaders from a configuration: which images, which views, which batches.

Up to five loaders of one kind serve a run: of the unlabelled batches with all their views, of the labelled batches that
steer the MMNN, and of bank, queries and pairs of views of the online probes.
"""

import hashlib
import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from cocor.config.options import Config, labelled_batch_size
from cocor.distributed.collectives import World
from cocor.methods import spec
from cocor.step.subsample import labelled_steps
from loaders.batch import Loader
from loaders.cpus import available_cores
from loaders.datasets.dataset import ImageDataset, read_label_split
from loaders.datasets.labels import stratified_split
from loaders.datasets.layout import folder_above, training_splits
from loaders.datasets.stored import StoredDataset
from loaders.errors import UserError
from loaders.open import open_images, open_loader
from loaders.prep.demo import or_demo
from loaders.progress import track
from loaders.synthetic import synthetic_dataset
from loaders.text import printable
from loaders.views.order import BatchOrder, CyclicOrder
from loaders.views.plan import Augmentation, ViewPlan

_log = logging.getLogger(__name__)

# Online probes use no more images than this: enough for a trend, seconds on a GPU.
KNN_BANK, KNN_QUERIES, KNN_PAIRS = 20_000, 5_000, 1_024
_KNN_BATCH = 256

_LABELLED_STREAM = 1 << 62


@dataclass(frozen=True)
class Data:
    """The data sets of a run; ``labelled`` holds those that show the MMNN labels."""

    train: ImageDataset
    labelled: ImageDataset | None
    held_out: ImageDataset | None


def open_data(config: Config) -> Data:
    """Read the folders that ``config`` names; UserError for what is missing."""
    if config.loader == "synthetic":
        train = synthetic_dataset(config.synthetic_images)
        return Data(train, train if config.learns_targets else None, None)
    root, held_out_root = _roots(config)
    train = open_images(root, config.labels, config.on_error, config.workers or None)
    unlabelled = int((train.labels < 0).sum())
    by_labels = spec(config.method).needs_labels
    if by_labels and unlabelled:
        lack = f"{unlabelled:,} of {len(train):,} images have no label, which --method {config.method} needs"
        raise UserError(f"{config.data}: {lack}; pass --labels FILE or another --method")
    if len(train.classes) == 1 and (config.learns_targets or by_labels):
        mistake = f"holds one class, {printable(train.classes[0])}, so that its labels say nothing"
        raise UserError(f"{config.data}: {mistake}; give a folder of several, or use --mmnn constants")
    held_out = None
    if held_out_root is not None:
        classes = train.classes or None
        held_out = open_images(held_out_root, None, config.on_error, config.workers or None, classes=classes)
    labelled = _labelled(config, train)
    if not train.classes and (above := folder_above(train.root)) is not None:
        _log.info(f"{config.data}: no class folders in it; if it is one class of several, give {printable(above)}")
    return Data(train, labelled, held_out)


def file_states(images: ImageDataset) -> dict[str, str]:
    """Digest the ``lengths`` and modification ``times`` of the files of ``images``."""
    kind, lengths, times = "folder", images.file_sizes, images.file_times
    if isinstance(images, StoredDataset):
        kind, status = "beton", images.file.path.stat()
        lengths, times = np.array([status.st_size]), np.array([status.st_mtime_ns])
    if lengths is None or times is None:
        return {}
    return {"kind": kind, "lengths": _sha256(lengths.tobytes()), "times": _sha256(times.tobytes())}


def content_digest(images: ImageDataset) -> str:
    """Digest the contents of all files of ``images``, in their order."""
    paths = [str(images.file.path)] if isinstance(images, StoredDataset) else images.paths

    def digest(path: str) -> bytes:
        try:
            with Path(path).open("rb") as file:
                return hashlib.file_digest(file, "sha256").digest()
        except OSError as error:
            raise UserError(f"{printable(path)}: cannot be read for --verify-data: {error.strerror}") from None

    with ThreadPoolExecutor(available_cores()) as pool:
        return _sha256(b"".join(track(pool.map(digest, paths), len(paths), "reading all images", "images")))


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def held_out_images(config: Config) -> Path | None:
    """Return the folder of the images for k-NN and probes; None if there are none."""
    return None if config.loader == "synthetic" else _roots(config)[1]


def _roots(config: Config) -> tuple[Path, Path | None]:
    """Find the training and held-out folders in ``--data`` and ``--val-data``."""
    if config.data is None:
        raise UserError("--data: name a folder of training images, or try --config configs/demo.yaml")
    root, held_out = or_demo(config.data), config.val_data
    if (splits := training_splits(root)) is not None:
        root, held_out = splits[0], held_out or splits[1]
    return root, held_out if config.knn_every or config.probe_every else None


def _labelled(config: Config, train: ImageDataset) -> ImageDataset | None:
    if not config.learns_targets:
        return None
    if (train.labels < 0).all():
        above = folder_above(train.root)
        hint = f"; if it is one class of several, give {printable(above)}" if above else ""
        remedy = f"pass --labels FILE, --mmnn constants, or --consistency none{hint}"
        raise UserError(f"{config.data}: no labels, which the MMNN learns from; {remedy}")
    labelled = _shown_labels(config, train)
    if config.shuffle_labels:
        order = np.random.default_rng(config.seed).permutation(len(labelled))
        labelled = replace(labelled, labels=labelled.labels[order])
    return labelled


def _shown_labels(config: Config, train: ImageDataset) -> ImageDataset:
    """Choose the images that show the MMNN their labels."""
    if config.label_split is not None:
        labelled = train.subset(read_label_split(config.label_split, train))
        if (labelled.labels == labelled.labels[0]).all():
            only = printable(train.classes[labelled.labels[0]])
            raise UserError(
                f"{config.label_split}: lists images of one class, {only}, so that labels say nothing; list some of "
                "several classes (cocor-prep labels does)"
            )
        return labelled
    return train.subset(stratified_split(train.labels, config.label_fraction, config.seed))


def training_plan(config: Config) -> ViewPlan:
    """Plan the views of the unlabelled batches (paper, "Experimental settings")."""
    contrastive = tuple(_augmentation(config, view) for view in range(2))
    if not config.has_composites:
        return ViewPlan(
            config.image_size, config.seed, contrastive, original="center" if config.has_center else "none",
            lengths=(), parameters=config.has_parameters, kept=config.kept_parts,
        )  # fmt: skip
    return ViewPlan(
        config.image_size, config.seed, contrastive, original="shared" if config.recipe == "paper" else "weak",
        originals=config.released_originals, original_scale=(config.crop_scale_min, 1.0), lengths=config.lengths,
        pool=config.pool, magnitudes=config.magnitudes, order=config.composite_order, weak=contrastive[0],
        parameters=config.has_parameters, kept=config.kept_parts,
    )  # fmt: skip


def _augmentation(config: Config, view: int) -> Augmentation:
    """Describe contrastive view 0 or 1, which an option of two values sets apart."""
    return Augmentation(
        crop_scale=(config.crop_scale_min, 1.0), brightness=config.brightness, contrast=config.contrast,
        saturation=config.saturation, hue=config.hue, jitter_prob=config.jitter_prob,
        grayscale_prob=config.grayscale_prob, blur_sigma=config.blur_sigma,
        blur_prob=config.blur_prob[min(view, len(config.blur_prob) - 1)],
        solarize_prob=config.solarize_prob[min(view, len(config.solarize_prob) - 1)],
    )  # fmt: skip


def labelled_plan(config: Config, stream: int = 0) -> ViewPlan:
    """Plan a classifier's usual training view: random resized crop and flip."""
    return ViewPlan(config.image_size, config.seed ^ stream, (), "shared", original_scale=(0.08, 1.0), lengths=())


def training_loader(config: Config, data: Data, world: World, dtype: torch.dtype) -> Loader:
    order = BatchOrder(len(data.train), config.batch_size, seed=config.seed, rank=world.rank, world_size=world.size)
    return _open(config, data.train, training_plan(config), order, world, dtype)


def labelled_loader(config: Config, data: Data, world: World, dtype: torch.dtype, steps: int) -> Loader | None:
    """Open the MMNN's labelled batches, one for each step in which it learns.

    A small labelled set is repeated within an epoch. None if no labels are needed.
    """
    if data.labelled is None:
        return None
    # Draws are named by seed and place in the set. If all images show their labels, or all but a few, the same seed
    # would name the same images and crops twice, and the MMNN would be judged on what the step has just trained on.
    stream = _LABELLED_STREAM if len(data.labelled) > len(data.train) // 2 else 0
    order = CyclicOrder(
        len(data.labelled), labelled_batch_size(config, world.size), steps=labelled_steps(config, steps),
        seed=config.seed ^ stream, rank=world.rank, world_size=world.size,
    )  # fmt: skip
    return _open(config, data.labelled, labelled_plan(config, stream), order, world, dtype, max(1, config.workers // 4))


def probe_loaders(config: Config, data: Data, world: World, dtype: torch.dtype) -> tuple[Loader, Loader, Loader] | None:
    """Open bank, queries and pairs of views of the online probes; None without labels."""
    if data.held_out is None or (data.train.labels < 0).all() or (data.held_out.labels < 0).all():
        return None

    def evaluation_loader(dataset: ImageDataset, limit: int, plan: ViewPlan) -> Loader:
        chosen = dataset.subset(evenly(np.flatnonzero(dataset.labels >= 0), limit))
        order = BatchOrder(len(chosen), _KNN_BATCH, shuffle=False, drop_last=False)
        return _open(config, chosen, plan, order, world, dtype)

    crops = ViewPlan(config.image_size, config.seed, (), "center", lengths=())
    views = tuple(_augmentation(config, view) for view in range(2))  # whose distance is the alignment
    pairs = ViewPlan(config.image_size, config.seed, views, "none", lengths=())
    return (
        evaluation_loader(data.train, KNN_BANK, crops), evaluation_loader(data.held_out, KNN_QUERIES, crops),
        evaluation_loader(data.held_out, KNN_PAIRS, pairs),
    )  # fmt: skip


def _open(config: Config, images: ImageDataset, plan: ViewPlan, order: BatchOrder, world: World, dtype: torch.dtype,
          workers: int | None = None) -> Loader:  # fmt: skip
    return open_loader(
        config.loader, images, plan, order, device=world.device, dtype=dtype, workers=workers or config.workers,
        hw_decoder_load=config.hw_decoder_load, on_error=config.on_error, mean=config.mean, std=config.std,
    )  # fmt: skip


def evenly(index: np.ndarray, limit: int) -> np.ndarray:
    """Choose at most ``limit`` entries of ``index``, evenly spaced."""
    if len(index) <= limit:
        return index
    return index[np.linspace(0, len(index) - 1, limit).round().astype(np.int64)]
