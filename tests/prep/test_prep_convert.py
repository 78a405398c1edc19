"""Conversion keeps bytes where it can, repairs what it must, and its output depends on the images alone."""

import os
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from helpers.prep_cases import (
    CORNERS,
    bad_cases,
    corner_colours,
    corner_image,
    good_cases,
    jpeg_bytes,
    png_bytes,
    write_all,
)
from PIL import Image

from loaders.datasets.beton import open_beton
from loaders.datasets.dataset import open_folder
from loaders.datasets.decode import decode
from loaders.errors import UserError
from loaders.prep.cli import main
from loaders.prep.convert import convert
from loaders.prep.encode import Settings, target_size
from loaders.prep.sources import open_source

COLOURS = np.array(list(CORNERS.values()), np.float64)


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_beton_file_holds_the_source_bytes_in_the_order_of_the_folder(photo_folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "photos.beton"
    done = convert(open_source(photo_folder), output, "beton", Settings(), workers=1)
    assert done.treatments == {"kept": 20, "repaired": 4}
    folder, file = open_folder(photo_folder), open_beton(output)
    assert file.classes == folder.classes and file.labels.tolist() == folder.labels.tolist()
    assert [name.removesuffix(".png.jpg") for name in file.names] == [n.removesuffix(".png") for n in folder.names]
    assert np.array_equal(file.sizes, folder.sizes)
    for index, path in enumerate(folder.paths):
        if path.endswith(".jpg"):
            assert bytes(file.read(index)) == Path(path).read_bytes()
        file.check(index)


def test_equal_bytes_whatever_the_workers_and_the_place(photo_folder: Path, tmp_path: Path) -> None:
    for number, workers in enumerate((1, 2, 1)):
        convert(open_source(photo_folder), tmp_path / f"{number}.beton", "beton", Settings(64), workers=workers)
    assert len({(tmp_path / f"{number}.beton").read_bytes() for number in range(3)}) == 1


@pytest.mark.parametrize("shorter_side", [None, 40])
@pytest.mark.parametrize("name", ["out.beton", "out"])
def test_corner_colours_survive_every_oddity_and_target(name: str, shorter_side: int | None, tmp_path: Path) -> None:
    write_all(tmp_path / "source" / "odd", good_cases())
    arguments = ["convert", str(tmp_path / "source"), str(tmp_path / name), "--workers", "1"]
    assert main(arguments + (["--shorter-side", str(shorter_side)] if shorter_side else [])) == 0
    if name == "out":
        data = open_folder(tmp_path / name)
        images = [decode(path) for path in data.paths]
    else:
        file = open_beton(tmp_path / name)
        images = [Image.open(BytesIO(file.read(i))) for i in range(len(file))]
        assert all(image.format == "JPEG" and image.mode == "RGB" for image in images)
        assert all(image.getexif().get(0x0112, 1) == 1 for image in images)
    assert len(images) == len(good_cases())
    for image in images:
        assert image.size == ((60, 40) if shorter_side else (96, 64))
        assert np.abs(corner_colours(image) - COLOURS).max() < 12


def test_raw_mode_stores_the_pixels_of_the_decoding_rule(photo_folder: Path, tmp_path: Path) -> None:
    source = open_source(photo_folder)
    convert(source, tmp_path / "raw.beton", "beton", Settings(raw=True), workers=1)
    file, folder = open_beton(tmp_path / "raw.beton"), open_folder(photo_folder)
    for index in (0, 5, 11):
        assert bytes(file.read(index)) == decode(folder.paths[index]).tobytes()
    convert(open_source(tmp_path / "raw.beton"), tmp_path / "again", "folder", Settings(), workers=1)
    assert np.array_equal(open_folder(tmp_path / "again").sizes, folder.sizes)


def test_the_shorter_side_is_meant_and_nothing_is_enlarged() -> None:
    assert target_size(500, 375, 256) == (341, 256)
    assert target_size(375, 500, 256) == (256, 341)
    assert target_size(200, 100, 256) == (200, 100)
    assert target_size(10_000, 10, 5) == (5000, 5)


def test_bad_images_stop_the_conversion_or_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_all(tmp_path / "source" / "class", {**bad_cases(), "good.jpg": jpeg_bytes(corner_image())})
    output = tmp_path / "out.beton"
    arguments = ["convert", str(tmp_path / "source"), str(output), "--workers", "1"]
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "source/class/" in error and "--on-error skip" in error
    assert names_in(tmp_path) == ["source"]
    assert main([*arguments, "--on-error", "skip"]) == 0
    skipped = {line.split(":")[0] for line in capsys.readouterr().out.splitlines() if line.startswith("skipped")}
    assert skipped == {f"skipped class/{name}" for name in bad_cases()}
    assert open_beton(output).names == ["class/good.jpg"]


def test_an_existing_output_is_kept_unless_forced(photo_folder: Path, tmp_path: Path) -> None:
    for name in ("out.beton", "out"):
        output = tmp_path / name
        arguments = ["convert", str(photo_folder), str(output), "--workers", "1", "--shorter-side", "32"]
        output.write_text("precious")
        assert main(arguments) == 2 and output.read_text() == "precious"
        assert main([*arguments, "--force"]) == 0
        assert main(["verify", str(output), "--workers", "1"]) == 0
        assert main(arguments) == 2
    assert names_in(tmp_path) == ["out", "out.beton"]


def test_an_output_that_would_mix_with_its_source_is_refused(photo_copy: Path) -> None:
    for output in (photo_copy, photo_copy / "inside", photo_copy.parent):
        with pytest.raises(UserError, match="source"):
            convert(open_source(photo_copy), output, "folder", Settings(), force=True)
    assert len(open_folder(photo_copy)) == 24


def test_an_output_that_cannot_be_written_is_told_before_the_source_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["convert", str(tmp_path / "none"), "/proc/x.beton"]) == 2
    assert "output /proc/x.beton: /proc cannot be written: " in capsys.readouterr().err


def test_a_subset_has_contiguous_labels_and_knows_its_classes(photo_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "list.txt").write_text("rocket  a comment\nchelsea\n")
    arguments = ["subset", str(photo_folder), str(tmp_path / "two.beton"), "--workers", "1", "--classes"]
    assert main([*arguments, str(tmp_path / "list.txt")]) == 0
    file = open_beton(tmp_path / "two.beton")
    assert file.classes == ["chelsea", "rocket"] and np.bincount(file.labels).tolist() == [6, 6]
    assert file.record is not None and file.record.facts["source"]["kind"] == "folder"


def test_unknown_classes_are_named(photo_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["subset", str(photo_folder), str(tmp_path / "x"), "--classes", "imagenet100"]) == 2
    assert "no class n01558993 (nor 99 more" in capsys.readouterr().err
    (tmp_path / "list.txt").write_text("rocket\n\nrocket\n")
    assert main(["subset", str(photo_folder), str(tmp_path / "x"), "--classes", str(tmp_path / "list.txt")]) == 2
    assert "list.txt:3: rocket is listed already in line 1" in capsys.readouterr().err


def test_images_larger_than_a_page_are_stored_whole(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    (tmp_path / "source" / "c").mkdir(parents=True)
    for name, side in (("a", 300), ("b", 2000), ("c", 300)):  # 2000 x 2000 x 3 = 12 MB
        Image.fromarray(rng.integers(0, 256, (side, side, 3), np.uint8)).save(tmp_path / f"source/c/{name}.jpg")
    convert(open_source(tmp_path / "source"), tmp_path / "x.beton", "beton", Settings(raw=True), workers=1)
    file = open_beton(tmp_path / "x.beton")
    first, last = file.table["data_ptr"], file.table["data_ptr"] + file.sizes_in_bytes.astype(np.uint64) - np.uint64(1)
    assert file.page_size == 1 << 24 and (first // file.page_size == last // file.page_size).all()
    for index in range(3):
        file.check(index)


def test_undecodable_names_survive_into_every_target(tmp_path: Path) -> None:
    write_all(tmp_path / "source" / os.fsdecode(b"caf\xe9"), {os.fsdecode(b"\xff\xfe.jpg"): jpeg_bytes(corner_image())})
    source = open_source(tmp_path / "source")
    convert(source, tmp_path / "x.beton", "beton", Settings(), workers=1)
    convert(source, tmp_path / "x", "folder", Settings(), workers=1)
    assert open_beton(tmp_path / "x.beton").names == source.names == open_folder(tmp_path / "x").names
    assert os.fsencode(source.names[0]) == b"caf\xe9/\xff\xfe.jpg"
    assert main(["info", str(tmp_path / "x.beton")]) == 0


def test_names_without_room_for_a_suffix_stay(tmp_path: Path) -> None:
    names = ["x" * 251 + ".png", "y" * 252, "z" * 247 + ".png"]
    write_all(tmp_path / "source" / "class", dict.fromkeys(names, png_bytes(corner_image())))
    assert main(["convert", str(tmp_path / "source"), str(tmp_path / "out"), "--workers", "1"]) == 0
    stored = [names[0], names[1], f"{names[2]}.jpg"]
    assert open_folder(tmp_path / "out").names == [f"class/{name}" for name in stored]
    assert main(["verify", str(tmp_path / "out"), "--workers", "1"]) == 0
    assert main(["labels", str(tmp_path / "source"), "--fraction", "1", "--output", str(tmp_path / "list")]) == 0
    assert main(["labels", str(tmp_path / "out"), "--check", str(tmp_path / "list")]) == 0


def test_messages_name_the_source(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Not the name under which an image would have been stored."""
    write_all(tmp_path / "flat" / "deep", {"x.png": bad_cases()["noise.jpg"], "y.jpg": jpeg_bytes(corner_image())})
    (tmp_path / "labels.csv").write_text("deep/x.png,a\ndeep/y.jpg,a\n")
    for source, more in (("flat/deep", []), ("flat", ["--labels", str(tmp_path / "labels.csv")])):
        shown = "deep/x.png" if more else "x.png"
        arguments = [str(tmp_path / source), *more, "--workers", "1"]
        output = tmp_path / f"{len(more)}.beton"
        assert main(["convert", *arguments, str(output)]) == 2
        assert f"{tmp_path}/flat/deep/x.png: not an image" in capsys.readouterr().err
        assert main(["convert", *arguments, str(output), "--on-error", "skip"]) == 0
        assert f"skipped {shown}: not an image" in capsys.readouterr().out
        record = open_beton(output).record
        assert record is not None and record.facts["skipped"][0][0] == shown
        assert main(["scan", *arguments, "--on-error", "stop"]) == 2
        assert f"{tmp_path}/flat/deep/x.png: not an image" in capsys.readouterr().err
