"""Which images a run trains on, and on which it is measured."""

import shutil
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from cocor.config.options import Config
from cocor.data import labelled_loader, open_data, training_loader, training_plan
from cocor.distributed.collectives import World
from loaders.channels import IMAGENET_MEAN, IMAGENET_STD
from loaders.kernels import pillow
from loaders.views.ops import END

WORLD = World(0, 0, 1, torch.device("cpu"))


def opened(data: Path, val_data: Path | None = None, knn_every: int = 1) -> tuple[Path, Path | None]:
    """Where the training and held-out images come from."""
    config = Config(data=data, val_data=val_data, knn_every=knn_every, loader="torch", consistency="none")
    found = open_data(config)
    return found.train.root, None if found.held_out is None else found.held_out.root


@pytest.mark.parametrize(
    ("train", "held_out"), [("train", "val"), ("train", "test"), ("training", "validation"), ("trn", "tst")]
)
def test_the_splits_of_a_folder_are_found(corner_folder: Path, tmp_path: Path, train: str, held_out: str) -> None:
    for name in (train, held_out):
        shutil.copytree(corner_folder, tmp_path / name)
    assert opened(tmp_path) == (tmp_path / train, tmp_path / held_out)
    assert opened(tmp_path, knn_every=0) == (tmp_path / train, None)
    assert opened(tmp_path, val_data=corner_folder) == (tmp_path / train, corner_folder)


def test_prepared_files_may_be_the_splits(photo_beton: Path, tmp_path: Path) -> None:
    for name in ("train", "val"):
        shutil.copy(photo_beton, tmp_path / f"{name}.beton")
    assert opened(tmp_path) == (tmp_path / "train.beton", tmp_path / "val.beton")


def test_what_is_validated_on_is_not_tested_on(corner_folder: Path, tmp_path: Path) -> None:
    for name in ("train", "val", "test"):
        shutil.copytree(corner_folder, tmp_path / name)
    assert opened(tmp_path) == (tmp_path / "train", tmp_path / "val")


def test_classes_are_no_splits(corner_folder: Path, tmp_path: Path) -> None:
    shutil.copytree(corner_folder / "a", tmp_path / "train")  # of the railway
    shutil.copytree(corner_folder / "b", tmp_path / "bus")
    assert opened(tmp_path) == (tmp_path, None)


@pytest.mark.parametrize("unlabelled_images", [0, 1])
def test_labelled_batches_are_drawn_apart(photo_folder: Path, unlabelled_images: int) -> None:
    """Over one set the two loaders draw apart: what lowers the loss of the images just trained on proves nothing."""
    config = Config(
        data=photo_folder, loader="torch", image_size=8, batch_size=8, labelled_batch_size=8, label_fraction=1.0
    )
    data = open_data(config)
    assert data.labelled is not None and len(data.labelled) == len(data.train) == 24
    data = replace(data, labelled=data.train.subset(range(24 - unlabelled_images)))
    unlabelled = training_loader(config, data, WORLD, torch.float32)
    labelled = labelled_loader(config, data, WORLD, torch.float32, unlabelled.steps_per_epoch)
    assert labelled is not None
    with closing(unlabelled), closing(labelled):  # type: ignore[type-var]
        pairs = [pair for e in range(4) for pair in zip(unlabelled.epoch(e), labelled.epoch(e), strict=True)]
    common = [len(set(batch.index.tolist()) & set(guiding.index.tolist())) for batch, guiding in pairs]
    assert 16 < sum(common) < 48  # 32 +- 4 by chance, 96 if they were the same


def test_composites_are_their_originals_plus_ops(photo_folder: Path) -> None:
    config = Config(data=photo_folder, loader="torch", image_size=32, batch_size=8, mmnn="constants")
    data = open_data(config)
    with closing(training_loader(config, data, WORLD, torch.float32)) as loader:  # type: ignore[type-var]
        batches = list(loader.epoch(1))
    scale, shift = (torch.tensor(values).view(3, 1, 1) for values in (IMAGENET_STD, IMAGENET_MEAN))

    def pixels(image: torch.Tensor) -> np.ndarray:
        return ((image * scale + shift) * 255).round().byte().permute(1, 2, 0).numpy()

    for batch in batches:
        index = batch.index.numpy()
        planned = training_plan(config).draw(1, index, data.train.sizes[index])
        for place in range(8):
            for number, length in enumerate((1, 2, 3)):
                codes, strengths = planned.codes[place, 3 + number], planned.magnitudes[place, 3 + number]
                image = pillow.view(pixels(batch.original[place]), False, codes, strengths)
                counts = np.bincount(codes[codes != END], minlength=14)
                assert counts.sum() == length and (batch.composition[number, place].numpy() == counts).all()
                assert (pixels(batch.composites[number, place]) == np.asarray(image)).all()
