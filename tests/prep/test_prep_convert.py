"""Conversion keeps bytes where it can, repairs what it must, and its output depends on the images alone."""

import os
from pathlib import Path

import numpy as np
from helpers.prep_cases import (
    CORNERS,
    Prep,
    bad_cases,
    corner_image,
    jpeg_bytes,
    write_all,
)  # fmt: skip
from PIL import Image

from loaders.datasets.beton import open_beton
from loaders.datasets.dataset import open_folder
from loaders.datasets.decode import decode
from loaders.prep.convert import convert
from loaders.prep.encode import Settings, target_size
from loaders.prep.sources import open_source

COLOURS = np.array(list(CORNERS.values()), np.float64)


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_beton_file_keeps_bytes_and_order(photo_folder: Path, tmp_path: Path) -> None:
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


def test_workers_and_place_do_not_change_bytes(photo_folder: Path, tmp_path: Path) -> None:
    for number, workers in enumerate((1, 2, 1)):
        convert(open_source(photo_folder), tmp_path / f"{number}.beton", "beton", Settings(64), workers=workers)
    assert len({(tmp_path / f"{number}.beton").read_bytes() for number in range(3)}) == 1


def test_raw_mode_stores_decoded_pixels(photo_folder: Path, tmp_path: Path) -> None:
    convert(open_source(photo_folder), tmp_path / "raw.beton", "beton", Settings(raw=True), workers=1)
    file, folder = open_beton(tmp_path / "raw.beton"), open_folder(photo_folder)
    for index in (0, 5, 11):
        assert bytes(file.read(index)) == decode(folder.paths[index]).tobytes()
    convert(open_source(tmp_path / "raw.beton"), tmp_path / "again", "folder", Settings(), workers=1)
    assert np.array_equal(open_folder(tmp_path / "again").sizes, folder.sizes)


def test_the_shorter_side_shrinks_only() -> None:
    sizes = {(500, 375, 256): (341, 256), (375, 500, 256): (256, 341), (200, 100, 256): (200, 100)}
    for given, expected in (sizes | {(10_000, 10, 5): (5000, 5)}).items():
        assert target_size(*given) == expected


def test_bad_images_stop_or_are_listed(prep: Prep, tmp_path: Path) -> None:
    write_all(tmp_path / "source" / "class", {**bad_cases(), "good.jpg": jpeg_bytes(corner_image())})
    arguments = ["convert", tmp_path / "source", tmp_path / "out.beton"]
    error = prep.refused(*arguments)
    assert "source/class/" in error and "--on-error skip" in error and names_in(tmp_path) == ["source"]
    said = prep(*arguments, "--on-error", "skip").splitlines()
    skipped = {line.split(":")[0] for line in said if line.startswith("skipped")}
    assert skipped == {f"skipped class/{name}" for name in bad_cases()}
    assert open_beton(tmp_path / "out.beton").names == ["class/good.jpg"]


def test_outputs_are_kept_unless_forced(prep: Prep, photo_folder: Path, tmp_path: Path) -> None:
    for name in ("out.beton", "out"):
        output = tmp_path / name
        arguments = ["convert", photo_folder, output, "--shorter-side", 32]
        output.write_text("precious")
        assert "exists" in prep.refused(*arguments) and output.read_text() == "precious"
        prep(*arguments, "--force")
        prep("verify", output)
        assert "exists" in prep.refused(*arguments)
    assert names_in(tmp_path) == ["out", "out.beton"]
    error = prep.refused("convert", tmp_path / "none", "/proc/x.beton")  # before the source is read
    assert "output /proc/x.beton: /proc cannot be written: " in error


def test_a_subset_has_contiguous_labels(prep: Prep, photo_folder: Path, tmp_path: Path) -> None:
    arguments = ["subset", photo_folder, tmp_path / "two.beton", "--classes"]
    assert "no class n01558993 (nor 99 more" in prep.refused(*arguments, "imagenet100")
    (tmp_path / "list.txt").write_text("rocket\n\nrocket\n")
    assert "list.txt:3: rocket is listed already in line 1" in prep.refused(*arguments, tmp_path / "list.txt")
    (tmp_path / "list.txt").write_text("rocket  a comment\nchelsea\n")
    prep(*arguments, tmp_path / "list.txt")
    file = open_beton(tmp_path / "two.beton")
    assert file.classes == ["chelsea", "rocket"] and np.bincount(file.labels).tolist() == [6, 6]
    assert file.record is not None and file.record.facts["source"]["kind"] == "folder"


def test_images_may_be_larger_than_a_page(tmp_path: Path) -> None:
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


def test_undecodable_names_survive(prep: Prep, tmp_path: Path) -> None:
    write_all(tmp_path / "source" / os.fsdecode(b"caf\xe9"), {os.fsdecode(b"\xff\xfe.jpg"): jpeg_bytes(corner_image())})
    source = open_source(tmp_path / "source")
    for name in ("x.beton", "x"):
        prep("convert", source.path, tmp_path / name)
    assert open_beton(tmp_path / "x.beton").names == source.names == open_folder(tmp_path / "x").names
    assert os.fsencode(source.names[0]) == b"caf\xe9/\xff\xfe.jpg"
    prep("info", tmp_path / "x.beton")


def test_messages_name_the_source(prep: Prep, tmp_path: Path) -> None:
    """Not the name under which an image would have been stored."""
    write_all(tmp_path / "flat" / "deep", {"x.png": bad_cases()["noise.jpg"], "y.jpg": jpeg_bytes(corner_image())})
    (tmp_path / "labels.csv").write_text("deep/x.png,a\ndeep/y.jpg,a\n")
    for source, more in (("flat/deep", []), ("flat", ["--labels", tmp_path / "labels.csv"])):
        shown, output = "deep/x.png" if more else "x.png", tmp_path / f"{len(more)}.beton"
        told = f"{tmp_path}/flat/deep/x.png: not an image"
        assert told in prep.refused("convert", tmp_path / source, *more, output)
        said = prep("convert", tmp_path / source, *more, output, "--on-error", "skip")
        assert f"skipped {shown}: not an image" in said
        record = open_beton(output).record
        assert record is not None and record.facts["skipped"][0][0] == shown
        code, _, error = prep.run("scan", tmp_path / source, *more, "--on-error", "stop")
        assert code == 2 and told in error
