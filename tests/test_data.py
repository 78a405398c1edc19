"""Which images a run trains on, and on which it is measured."""

import shutil
from pathlib import Path

import pytest

from cocor.config import Config
from cocor.data import open_data


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
