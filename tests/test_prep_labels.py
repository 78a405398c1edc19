"""Label lists: the training's own choice, written for people, checked line by line."""

import re
import shutil
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from prep_cases import corner_image, jpeg_bytes, write_all

from loaders.beton import open_beton
from loaders.dataset import open_folder, read_label_split
from loaders.prep.cli import main
from loaders.split import stratified_split

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


@pytest.mark.parametrize("fraction", ["0", "1.5", "-1", "nan"])
def test_impossible_fractions_are_refused(fraction: str, data: Path, tmp_path: Path) -> None:
    assert main(["labels", str(data), "--fraction", fraction, "--output", str(tmp_path / "list")]) == 2
    assert not (tmp_path / "list").exists()


def test_data_without_labels_is_refused_with_the_remedy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_all(tmp_path / "flat", {"a.jpg": TINY})
    assert main(["labels", str(tmp_path / "flat"), "--output", str(tmp_path / "list")]) == 2
    assert "--labels" in capsys.readouterr().err
