"""Label lists: the training's own choice, written for people, checked line by line."""

import os
import re
import shutil
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from helpers.prep_cases import corner_image, jpeg_bytes, png_bytes, write_all

from loaders.datasets.beton import open_beton
from loaders.datasets.dataset import open_folder, read_label_split
from loaders.datasets.labels import stratified_split
from loaders.open import open_images
from loaders.prep.cli import main
from loaders.text import bare

TINY = jpeg_bytes(corner_image((16, 16)))


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


def test_lists_are_nested_stratified_and_never_without_a_class(data: Path, tmp_path: Path) -> None:
    lists = [write(data, tmp_path / f"{fraction}", fraction) for fraction in (0.001, 0.01, 0.1, 0.5, 1)]
    for smaller, larger in pairwise(lists):
        assert set(smaller) <= set(larger)
    counts = [[sum(name.startswith(f"{letter}/") for name in names) for letter in "abcde"] for names in lists]
    assert counts == [[1] * 5, [1] * 5, [6, 6, 3, 1, 1], [30, 30, 15, 5, 2], [60, 60, 30, 9, 3]]


def test_a_list_is_what_training_would_choose_by_itself(data: Path, tmp_path: Path) -> None:
    write(data, tmp_path / "list", 0.1, "--seed", "3")
    folder = open_folder(data)
    chosen = np.sort(read_label_split(tmp_path / "list", folder))
    assert chosen.tolist() == stratified_split(folder.labels, 0.1, 3).tolist()


def test_the_seed_alone_decides(data: Path, tmp_path: Path) -> None:
    write(data, tmp_path / "first", 0.1, "--seed", "1")
    write(data, tmp_path / "second", 0.1, "--seed", "1")
    assert (tmp_path / "first").read_bytes() == (tmp_path / "second").read_bytes()
    assert write(data, tmp_path / "third", 0.1, "--seed", "2") != names_in(tmp_path / "first")


def test_a_list_fits_the_converted_data_too(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    beton = tmp_path / "x.beton"
    assert main(["convert", str(data), str(beton), "--workers", "1", "--shorter-side", "8"]) == 0
    write(data, tmp_path / "list", 0.2)
    write(beton, tmp_path / "again", 0.2)
    assert (tmp_path / "list").read_bytes() == (tmp_path / "again").read_bytes()
    capsys.readouterr()
    assert main(["labels", str(beton), "--check", str(tmp_path / "list")]) == 0
    assert "note" not in capsys.readouterr().out
    assert open_beton(beton).classes == list("abcde")


def test_faults_of_a_list_are_named_by_line(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "list"

    def complaint(text: str) -> str:
        path.write_text(text)
        assert main(["labels", str(data), "--check", str(path)]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        return error

    assert "list:3: a/99.jpg is not" in complaint("a/1.jpg\n\na/99.jpg\n")
    assert "list:2: a/1.jpg is listed already in line 1" in complaint("a/1.jpg\na/1.jpg\n")
    assert "lists no images" in complaint("# nothing\n")
    write(data, path, 0.2, "--force")
    assert "digest" in complaint(re.sub(r"\nd/\d+\.jpg\n", "\n", path.read_text()))


def test_lists_from_elsewhere_are_accepted_with_notes(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "list").write_text("a/1.jpg\r\nb/2.jpg\r\n")
    assert main(["labels", str(data), "--check", str(tmp_path / "list")]) == 0
    output = capsys.readouterr().out
    assert (
        "2 images of this data set" in output and "no digest" in output and "no image of 3 of the 5 classes" in output
    )


def test_a_list_for_other_data_is_noticed(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(data, tmp_path / "list", 0.1)
    shutil.copytree(data, tmp_path / "more")
    write_all(tmp_path / "more" / "a", {"new.jpg": TINY})
    assert main(["labels", str(tmp_path / "more"), "--check", str(tmp_path / "list")]) == 0
    assert "other names or labels" in capsys.readouterr().out


def test_unusable_images_are_not_chosen_and_told(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(data, tmp_path / "data")
    write_all(tmp_path / "data" / "e", {"bad.jpg": b"x", "worse.jpg": b""})
    names = write(tmp_path / "data", tmp_path / "list", 1)
    assert "note: 2 unusable images left out, such as e/bad.jpg: not an image" in capsys.readouterr().out
    assert names == write(data, tmp_path / "right", 1)
    assert main(["labels", str(tmp_path / "data"), "--output", str(tmp_path / "no"), "--on-error", "stop"]) == 2
    assert "e/bad.jpg: not an image" in capsys.readouterr().err


def test_names_with_line_breaks_can_be_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ["two\nlines.jpg", "two\nlines.png", "\rback.jpg", os.fsdecode(b"\xff\n.jpg"), " #blank .jpg", "usual.jpg"]
    write_all(tmp_path / "data" / "a", dict.fromkeys(names, TINY))
    assert main(["convert", str(tmp_path / "data"), str(tmp_path / "x.beton"), "--workers", "1"]) == 0
    listed = write(tmp_path / "data", tmp_path / "list", 1)
    assert len(listed) == 6 and r"a/two\nlines.jpg" in listed
    for data in (open_folder(tmp_path / "data"), open_images(tmp_path / "x.beton")):
        assert sorted(read_label_split(tmp_path / "list", data)) == list(range(6))
    write_all(tmp_path / "data" / "a", {r"two\nlines.jpg": TINY})
    assert main(["labels", str(tmp_path / "data"), "--fraction", "1", "--output", str(tmp_path / "no")]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and r"a/two\nlines.jpg: no line of text can tell it from others" in error


def test_data_without_labels_is_refused_with_the_remedy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_all(tmp_path / "flat", {"a.jpg": TINY})
    assert main(["labels", str(tmp_path / "flat"), "--output", str(tmp_path / "list")]) == 2
    assert "--labels" in capsys.readouterr().err


@pytest.fixture(scope="module")
def forms(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One set as a folder of PNGs and others, a .beton, a resized folder, a tar, and made back from the .beton."""
    root = tmp_path_factory.mktemp("forms")
    image = corner_image((16, 16))
    for name in "ab":
        odd = {"1.jpg": TINY, "1.png": png_bytes(image), "plain": png_bytes(image), "plain (2)": png_bytes(image)}
        write_all(root / "folder" / name, odd | {f"{i}.png": png_bytes(image) for i in range(2, 30)})
    for source, output in (("folder", "x.beton"), ("folder", "small"), ("x.beton", "back")):
        more = ["--shorter-side", "8"] if output == "small" else []
        assert main(["convert", str(root / source), str(root / output), "--workers", "1", *more]) == 0
    shutil.make_archive(str(root / "packed"), "tar", root / "folder")
    return {name: root / name for name in ("folder", "x.beton", "small", "back", "packed.tar")}


class TestListsCarryOver:
    """A list fits the folder and all that was converted from it, whatever became of the names."""

    @pytest.mark.parametrize("written_for", ["folder", "x.beton", "small", "back", "packed.tar"])
    def test_between_all_forms(
        self, written_for: str, forms: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        names = write(forms[written_for], tmp_path / "list", 0.3)
        wanted = sorted(map(bare, names))
        for path in forms.values():
            capsys.readouterr()
            assert main(["labels", str(path), "--check", str(tmp_path / "list")]) == 0
            assert "note" not in capsys.readouterr().out, path
            if path.suffix != ".tar":
                data = open_images(path)
                assert sorted(bare(data.names[i]) for i in read_label_split(tmp_path / "list", data)) == wanted

    def test_the_same_choice_for_the_folder_and_the_file_made_from_it(
        self, forms: dict[str, Path], tmp_path: Path
    ) -> None:
        first, second = (write(forms[name], tmp_path / name, 0.3) for name in ("folder", "x.beton"))
        assert list(map(bare, first)) == list(map(bare, second))
        for name in ("folder", "x.beton"):
            data = open_images(forms[name])
            chosen = {bare(data.names[i]) for i in stratified_split(data.labels, 0.3, 0)}
            assert chosen == set(map(bare, first))

    def test_from_a_flat_folder_with_a_label_file(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        image = png_bytes(corner_image((16, 16)))
        write_all(tmp_path / "flat", {f"{i}.png": image for i in range(20)})
        write_all(tmp_path / "flat" / "deep", {f"{i}.png": image for i in range(20)})
        names = [f"{i}.png" for i in range(20)] + [f"deep/{i}.png" for i in range(20)]
        labels = tmp_path / "labels.csv"
        labels.write_text("".join(f"{name},{'xy'[i % 2]}\n" for i, name in enumerate(names)))
        flat = ["--labels", str(labels)]
        assert main(["convert", str(tmp_path / "flat"), str(tmp_path / "x.beton"), "--workers", "1", *flat]) == 0
        from_flat = write(tmp_path / "flat", tmp_path / "one", 0.2, *flat)
        write(tmp_path / "x.beton", tmp_path / "two", 0.2)
        folder, stored = open_folder(tmp_path / "flat", labels), open_images(tmp_path / "x.beton")
        for name in ("one", "two"):
            capsys.readouterr()
            assert main(["labels", str(tmp_path / "flat"), *flat, "--check", str(tmp_path / name)]) == 0
            assert main(["labels", str(tmp_path / "x.beton"), "--check", str(tmp_path / name)]) == 0
            assert "note" not in capsys.readouterr().out
            left, right = (read_label_split(tmp_path / name, data) for data in (folder, stored))
            assert len(left) == len(from_flat) == 8
            pairs = zip([folder.names[i] for i in left], [stored.names[i] for i in right], strict=True)
            assert all(b == f"{b[0]}/{a.replace('/', '_')}.jpg" for a, b in pairs)

    def test_names_that_would_fit_two_images_are_refused_by_line(
        self, forms: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        for name in ("a/1", "1.png", "b/1.webp"):
            (tmp_path / "list").write_text(f"a/2.png\n{name}\n")
            assert main(["labels", str(forms["small"]), "--check", str(tmp_path / "list")]) == 2
            assert f"list:2: {name} is not (or not uniquely)" in capsys.readouterr().err
