"""The demo tiles: made offline, the same each time, and not to be told apart by colour."""

import tempfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from loaders.datasets.dataset import open_folder
from loaders.errors import UserError
from loaders.prep import demo


@pytest.fixture(scope="module")
def tiles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return demo.make_demo(tmp_path_factory.mktemp("cache") / "demo")


def load(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    data = open_folder(folder)
    return np.stack([np.asarray(Image.open(path)) for path in data.paths]), data.labels


def nearest_neighbours(train: np.ndarray, train_labels: np.ndarray, val: np.ndarray, k: int = 20) -> np.ndarray:
    """Labels of ``val`` by a vote of the k nearest rows of ``train``."""
    distances = (val**2).sum(1)[:, None] - 2 * val @ train.T + (train**2).sum(1)[None]
    votes = train_labels[np.argpartition(distances, k, axis=1)[:, :k]]
    return np.array([np.bincount(row, minlength=10).argmax() for row in votes])


def test_both_splits_have_the_same_ten_classes_and_enough_tiles(tiles: Path) -> None:
    train, val = open_folder(tiles / "train"), open_folder(tiles / "val")
    assert train.classes == val.classes and len(train.classes) == 10
    assert np.bincount(train.labels).tolist() == [demo.TRAIN] * 10
    assert np.bincount(val.labels).tolist() == [demo.VAL] * 10
    assert not train.skipped and (train.sizes == demo.TILE).all()


def test_it_is_made_once_and_has_the_same_bytes_every_time(tiles: Path, tmp_path: Path) -> None:
    (tmp_path / "again").mkdir()  # an empty folder will do
    again = demo.make_demo(tmp_path / "again")
    files = sorted(path.relative_to(tiles) for path in tiles.rglob("*.jpg"))
    assert files == sorted(path.relative_to(again) for path in again.rglob("*.jpg"))
    assert all((tiles / file).read_bytes() == (again / file).read_bytes() for file in files)
    before = (again / files[0]).stat().st_mtime_ns
    assert demo.make_demo(again) == again and (again / files[0]).stat().st_mtime_ns == before


def test_colour_statistics_tell_nothing_about_the_class(tiles: Path) -> None:
    (train, train_labels), (val, val_labels) = load(tiles / "train"), load(tiles / "val")

    def histograms(images: np.ndarray) -> np.ndarray:
        bins = (images // 32).astype(np.int64) @ [64, 8, 1]
        counts = [np.bincount(image.ravel(), minlength=512) for image in bins]
        return np.sqrt(np.stack(counts).astype(np.float64))

    def statistics(images: np.ndarray) -> np.ndarray:
        pixels = images.reshape(len(images), -1, 3).astype(np.float64)
        return np.concatenate([pixels.mean(1), pixels.std(1)], axis=1)

    for features in (histograms, statistics):
        found = nearest_neighbours(features(train), train_labels, features(val))
        assert (found == val_labels).mean() < 0.18  # chance is 0.10


def test_tiles_are_in_colour(tiles: Path) -> None:
    images = load(tiles / "val")[0].astype(np.float64)
    colourfulness = (images.max(3) - images.min(3)).mean((1, 2))
    assert np.median(colourfulness) > 20


def test_a_folder_with_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("precious")
    with pytest.raises(UserError, match="exists"):
        demo.make_demo(tmp_path)
    assert (tmp_path / "mine.txt").read_text() == "precious"


def test_a_missing_scikit_image_is_named_with_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install"):
        demo.make_demo(tmp_path / "demo")


def test_where_the_cache_cannot_be_written_it_is_made_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null/cache")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert demo.default_folder().is_relative_to(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", "/dev/null")
    with pytest.raises(UserError, match=r"/dev/null/cache/cocor: cannot be written, .* XDG_CACHE_HOME"):
        demo.make_demo()
