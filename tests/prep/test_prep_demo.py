"""The demo tiles: made offline, the same each time, and not to be told apart by colour."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sklearn.neighbors import KNeighborsClassifier

from cocor import run_dir
from cocor.config.options import Config
from loaders.datasets.dataset import open_folder
from loaders.errors import UserError
from loaders.prep import demo


@pytest.fixture(scope="module")
def tiles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return demo.make_demo(tmp_path_factory.mktemp("cache") / "demo")


def load(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    data = open_folder(folder)
    return np.stack([np.asarray(Image.open(path)) for path in data.paths]), data.labels


def test_both_splits_have_ten_classes(tiles: Path) -> None:
    train, val = open_folder(tiles / "train"), open_folder(tiles / "val")
    assert train.classes == val.classes and len(train.classes) == 10
    assert np.bincount(train.labels).tolist() == [demo.TRAIN] * 10
    assert np.bincount(val.labels).tolist() == [demo.VAL] * 10
    assert not train.skipped and (train.sizes == demo.TILE).all()


def test_it_is_made_once_with_the_same_bytes(tiles: Path, tmp_path: Path) -> None:
    (tmp_path / "again").mkdir()  # an empty folder will do
    again = demo.make_demo(tmp_path / "again")
    files = sorted(path.relative_to(tiles) for path in tiles.rglob("*.jpg"))
    assert files == sorted(path.relative_to(again) for path in again.rglob("*.jpg"))
    assert all((tiles / file).read_bytes() == (again / file).read_bytes() for file in files)
    before = (again / files[0]).stat().st_mtime_ns
    assert demo.make_demo(again) == again and (again / files[0]).stat().st_mtime_ns == before


def test_colours_tell_nothing_about_the_class(tiles: Path) -> None:
    (train, train_labels), (val, val_labels) = load(tiles / "train"), load(tiles / "val")

    def histograms(images: np.ndarray) -> np.ndarray:
        bins = (images // 32).astype(np.int64) @ [64, 8, 1]
        return np.sqrt(np.stack([np.bincount(image.ravel(), minlength=512) for image in bins]))

    def statistics(images: np.ndarray) -> np.ndarray:
        pixels = images.reshape(len(images), -1, 3).astype(np.float64)
        return np.concatenate([pixels.mean(1), pixels.std(1)], axis=1)

    for features in (histograms, statistics):
        probe = KNeighborsClassifier(20).fit(features(train), train_labels)
        assert probe.score(features(val), val_labels) < 0.18  # chance is 0.10
    colourfulness = (val.max(3) - val.min(3)).mean((1, 2))  # there are colours, though
    assert np.median(colourfulness) > 20


def test_another_folder_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("precious")
    with pytest.raises(UserError, match="exists"):
        demo.make_demo(tmp_path)
    assert (tmp_path / "mine.txt").read_text() == "precious"


def test_a_missing_scikit_image_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install"):
        demo.make_demo(tmp_path / "demo")


@pytest.mark.parametrize(("there", "meant"), [([], True), (["demo/config.yaml"], True), (["demo/a/1.jpg"], False)])
def test_a_run_may_be_called_demo(
    there: list[str], meant: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Images of that name are meant by ``--data demo``; a run is not."""
    monkeypatch.chdir(tmp_path)
    for name in there:
        Path(name).parent.mkdir(parents=True)
        Path(name).write_text("# cocor 0.1.0, python 3.12\n")
    assert demo.is_demo(Path("demo")) == meant
    if meant:
        run_dir.check(Config(data=Path("demo"), output=Path("demo"), resume="auto"))
