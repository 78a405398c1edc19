"""Label lists: the training's own choice, written for people, checked line by line."""

import re
import shutil
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from helpers.prep_cases import Prep, corner_image, jpeg_bytes, png_bytes, write_all

from loaders.datasets.dataset import open_folder, read_label_split
from loaders.datasets.labels import stratified_split
from loaders.open import open_images
from loaders.prep.cli import main
from loaders.text import bare

TINY, TINY_PNG = jpeg_bytes(corner_image((16, 16))), png_bytes(corner_image((16, 16)))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five classes of 2 to 60 images."""
    root = tmp_path_factory.mktemp("labels") / "data"
    for name, count in (("a", 60), ("b", 60), ("c", 30), ("d", 9), ("e", 2)):
        write_all(root / name, {f"{i}.jpg": TINY for i in range(count)})
    write_all(root / "e", {"#odd name.jpg": TINY})
    return root


def names_in(path: Path) -> list[str]:
    return [line for line in path.read_text().splitlines() if not line.startswith("#")]


def write(data: Path, output: Path, fraction: float, *more: str) -> list[str]:
    assert main(["labels", str(data), "--fraction", str(fraction), "--output", str(output), *more]) == 0
    return names_in(output)


def test_lists_are_nested_and_stratified(data: Path, tmp_path: Path) -> None:
    lists = [write(data, tmp_path / f"{fraction}", fraction) for fraction in (0.001, 0.01, 0.1, 0.5, 1)]
    for smaller, larger in pairwise(lists):
        assert set(smaller) <= set(larger)
    counts = [[sum(name.startswith(f"{letter}/") for name in names) for letter in "abcde"] for names in lists]
    assert counts == [[1] * 5, [1] * 5, [6, 6, 3, 1, 1], [30, 30, 15, 5, 2], [60, 60, 30, 9, 3]]


def test_a_list_is_what_training_would_choose(data: Path, tmp_path: Path) -> None:
    """By the seed alone."""
    first, again, other = (write(data, tmp_path / f"{n}", 0.1, "--seed", seed) for n, seed in enumerate("332"))
    assert (tmp_path / "0").read_bytes() == (tmp_path / "1").read_bytes() and first == again != other
    folder = open_folder(data)
    chosen = np.sort(read_label_split(tmp_path / "0", folder))
    assert chosen.tolist() == stratified_split(folder.labels, 0.1, 3).tolist()


def test_faults_of_a_list_are_named_by_line(prep: Prep, data: Path, tmp_path: Path) -> None:
    path = tmp_path / "list"

    def complaint(text: str) -> str:
        path.write_text(text)
        return prep.refused("labels", data, "--check", path)

    assert "list:3: a/99.jpg is not" in complaint("a/1.jpg\n\na/99.jpg\n")
    assert "list:2: a/1.jpg is listed already in line 1" in complaint("a/1.jpg\na/1.jpg\n")
    assert "lists no images" in complaint("# nothing\n")
    write(data, path, 0.2, "--force")
    assert "digest" in complaint(re.sub(r"\nd/\d+\.jpg\n", "\n", path.read_text()))


def test_foreign_lists_are_accepted_with_notes(prep: Prep, data: Path, tmp_path: Path) -> None:
    (tmp_path / "list").write_text("a/1.jpg\r\nb/2.jpg\r\n")
    said = prep("labels", data, "--check", tmp_path / "list")
    assert "2 images of this data set" in said and "no digest" in said and "no image of 3 of the 5 classes" in said
    write(data, tmp_path / "list", 0.1, "--force")
    shutil.copytree(data, tmp_path / "more")
    write_all(tmp_path / "more" / "a", {"new.jpg": TINY})
    assert "other names or labels" in prep("labels", tmp_path / "more", "--check", tmp_path / "list")


def test_unusable_images_are_not_chosen(prep: Prep, data: Path, tmp_path: Path) -> None:
    shutil.copytree(data, tmp_path / "data")
    write_all(tmp_path / "data" / "e", {"bad.jpg": b"x", "worse.jpg": b""})
    said = prep("labels", tmp_path / "data", "--fraction", 1, "--output", tmp_path / "list")
    assert "note: 2 unusable images left out, such as e/bad.jpg: not an image" in said
    assert names_in(tmp_path / "list") == write(data, tmp_path / "right", 1)
    error = prep.refused("labels", tmp_path / "data", "--output", tmp_path / "no", "--on-error", "stop")
    assert "e/bad.jpg: not an image" in error
    assert "has no labels; give class" in prep.refused("labels", data / "a", "--output", tmp_path / "no")


FORMS = ["folder", "x.beton", "small", "back", "packed.tar"]


@pytest.fixture(scope="module")
def forms(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One set as a folder of PNGs and others, a .beton, a resized folder, one made back from the .beton, and a tar."""
    root = tmp_path_factory.mktemp("forms")
    names = ["1.png", "plain", "plain (2)", *(f"{i}.png" for i in range(2, 30))]
    for name in "ab":
        write_all(root / "folder" / name, dict.fromkeys(names, TINY_PNG) | {"1.jpg": TINY})
    for source, output in (("folder", "x.beton"), ("folder", "small"), ("x.beton", "back")):
        more = ["--shorter-side", "8"] if output == "small" else []
        assert main(["convert", str(root / source), str(root / output), "--workers", "1", *more]) == 0
    shutil.make_archive(str(root / "packed"), "tar", root / "folder")
    return root


class TestListsCarryOver:
    """A list fits the folder and all that was converted from it, whatever became of the names."""

    @pytest.mark.parametrize("written_for", FORMS)
    def test_between_all_forms(self, written_for: str, prep: Prep, forms: Path, tmp_path: Path) -> None:
        wanted = sorted(map(bare, write(forms / written_for, tmp_path / "list", 0.3)))
        for name in FORMS:
            assert "note" not in prep("labels", forms / name, "--check", tmp_path / "list"), name
            if name != "packed.tar":
                data = open_images(forms / name)
                assert sorted(bare(data.names[i]) for i in read_label_split(tmp_path / "list", data)) == wanted

    def test_from_a_flat_folder_with_a_label_file(self, prep: Prep, tmp_path: Path) -> None:
        names = [f"{i}.png" for i in range(20)] + [f"deep/{i}.png" for i in range(20)]
        write_all(tmp_path / "flat", dict.fromkeys(names, TINY_PNG))
        labels = tmp_path / "labels.csv"
        labels.write_text("".join(f"{name},{'xy'[i % 2]}\n" for i, name in enumerate(names)))
        flat = ["--labels", str(labels)]
        prep("convert", tmp_path / "flat", tmp_path / "x.beton", *flat)
        from_flat = write(tmp_path / "flat", tmp_path / "one", 0.2, *flat)
        write(tmp_path / "x.beton", tmp_path / "two", 0.2)
        folder, stored = open_folder(tmp_path / "flat", labels), open_images(tmp_path / "x.beton")
        for name in ("one", "two"):
            assert "note" not in prep("labels", tmp_path / "flat", *flat, "--check", tmp_path / name)
            assert "note" not in prep("labels", tmp_path / "x.beton", "--check", tmp_path / name)
            left, right = (read_label_split(tmp_path / name, data) for data in (folder, stored))
            assert len(left) == len(from_flat) == 8
            pairs = zip([folder.names[i] for i in left], [stored.names[i] for i in right], strict=True)
            assert all(b == f"{b[0]}/{a.replace('/', '_')}.jpg" for a, b in pairs)

    @pytest.mark.parametrize("name", ["a/1", "1.png", "b/1.webp"])
    def test_names_of_two_images_are_refused(self, name: str, prep: Prep, forms: Path, tmp_path: Path) -> None:
        (tmp_path / "list").write_text(f"a/2.png\n{name}\n")
        error = prep.refused("labels", forms / "small", "--check", tmp_path / "list")
        assert f"list:2: {name} is not (or not uniquely)" in error
