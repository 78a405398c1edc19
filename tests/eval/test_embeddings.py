"""Features come out in a file with names and labels, in order; an image's neighbours are found."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from cocor.eval.cli import main

FLAGS = ["--image-size", "32", "--gpu", "no", "--workers", "0"]


def call(command: str, *flags: str) -> int:
    return main([command, "random:test_resnet", *flags, *FLAGS])


def read(path: Path) -> dict[str, Any]:
    """What a file holds, with names and classes as text."""
    if path.suffix == ".parquet":
        table = pytest.importorskip("pyarrow.parquet").read_table(path)
        found = {name: table[name].to_pylist() for name in ("name", "label", "class")}
        return found | {"features": np.stack(table["features"].to_numpy())}
    arrays = np.load(path) if path.suffix == ".npz" else dict(pytest.importorskip("zarr").open(path, mode="r").arrays())
    labels, classes = np.asarray(arrays["labels"]).tolist(), np.asarray(arrays["classes"]).tolist()
    names = np.asarray(arrays["names"]).tolist()
    named = [classes[label] for label in labels]
    return {"name": names, "label": labels, "class": named, "features": np.asarray(arrays["features"])}


@pytest.mark.parametrize(("suffix", "package"), [("npz", "numpy"), ("parquet", "pyarrow"), ("zarr", "zarr")])
def test_features_come_out_in_order(suffix: str, package: str, photo_folder: Path, tmp_path: Path) -> None:
    pytest.importorskip(package)
    whole, again = tmp_path / f"a.{suffix}", tmp_path / "again.npz"
    for _ in range(2):  # the second replaces the first
        assert call("embed", "--data", str(photo_folder), "--output", str(whole)) == 0
    found = read(whole)
    assert found["name"] == sorted(f"{path.parent.name}/{path.name}" for path in photo_folder.glob("*/*.*g"))
    assert found["class"] == [name.partition("/")[0] for name in found["name"]]
    assert found["features"].dtype == np.float32 and len(np.unique(found["features"], axis=0)) == 24
    assert call("embed", "--data", str(photo_folder), "--output", str(again), "--batch-size", "5") == 0
    np.testing.assert_allclose(read(again)["features"], found["features"], rtol=1e-4, atol=1e-5)


def test_unreadable_images_are_left_out(photo_copy: Path, tmp_path: Path) -> None:
    (photo_copy / "coffee" / "2.jpg").write_bytes(b"no image")
    here = ["--data", str(photo_copy), "--on-error", "skip"]
    assert call("embed", *here, "--output", str(tmp_path / "f.npz"), "--picture", "tsne") == 0
    found = read(tmp_path / "f.npz")
    assert len(found["name"]) == len(found["features"]) == 23 and "coffee/2.jpg" not in found["name"]
    assert Image.open(tmp_path / "f.png").width > 400


def test_neighbours_of_a_file_and_of_a_name(photo_folder: Path, tmp_path: Path) -> None:
    copy, own = tmp_path / "copy.jpg", "coffee/1.jpg"
    copy.write_bytes((photo_folder / own).read_bytes())
    here = ["--data", str(photo_folder), "--output", str(tmp_path), "--neighbours", "3"]
    for image in (str(copy), own, str(photo_folder / own)):
        assert call("neighbours", image, *here) == 0
    copied, named = (json.loads((tmp_path / f"neighbours_{stem}.json").read_text())["result"]["rows"][0]
                     for stem in ("copy", "1"))  # fmt: skip
    assert copied["neighbours"][0] == own and copied["similarities"][0] == pytest.approx(1)
    assert named["neighbours"][:2] == copied["neighbours"][1:]  # without the image itself
    assert Image.open(tmp_path / "neighbours_copy.png").width > 400


@pytest.mark.parametrize(("flags", "message"), [
    (["embed", "--output", "f.csv"], "--output f.csv: features are written as .npz, .parquet, .zarr"),
    (["embed", "--output", "FOLDER.zarr"], "is a folder of something else"),
    (["neighbours", "none.jpg"], "none.jpg: no such file, nor an image of --data by that name"),
    (["neighbours", "FILE"], "file.txt: not an image of any known kind"),
    (["neighbours", "coffee/1.jpg", "--neighbours", "24"], "--neighbours 24: there are 23 images"),
])  # fmt: skip
def test_mistakes_are_one_line(
    flags: list[str], message: str, photo_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "folder.zarr").mkdir()
    (tmp_path / "file.txt").write_text("no image")
    places = {"FOLDER.zarr": tmp_path / "folder.zarr", "FILE": tmp_path / "file.txt"}
    command, *flags = (str(places.get(word, word)) for word in flags)
    assert call(command, *flags, "--data", str(photo_folder)) == 2
    assert message in capsys.readouterr().err.splitlines()[-1]
