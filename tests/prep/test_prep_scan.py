"""A scan finds what is wrong or odd in a collection, names it, and survives it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers.prep_cases import (
    bad_cases,
    bomb_png,
    corner_image,
    good_cases,
    jpeg_bytes,
    png_bytes,
    twice_oriented_jpeg,
    write_all,
)
from PIL import Image

from loaders.prep.byte_ranges import FileBytes
from loaders.prep.cli import main
from loaders.prep.encode import Settings, encode
from loaders.prep.scan import Finding, examine

LIMIT = 178_000_000


def finding(path: Path, data: bytes, max_pixels: int = LIMIT) -> Finding:
    path.write_bytes(data)
    return examine(path.name, FileBytes(str(path)), max_pixels)


@pytest.fixture
def collection(tmp_path: Path) -> Path:
    """Good, odd and bad files, and names that are no images at all."""
    root = tmp_path / "source"
    write_all(root / "class", good_cases() | bad_cases())
    write_all(root / "class" / ".hidden", {"x.jpg": b""})
    write_all(root / ".thumbnails", {"x.jpg": jpeg_bytes(corner_image())})
    write_all(root / os.fsdecode(b"caf\xe9"), {os.fsdecode(b"\xff.jpg"): jpeg_bytes(corner_image())})
    (root / "class" / "loop").symlink_to(root)
    (root / "class" / "twice.jpg").symlink_to(root / "class" / "plain.jpg")
    (root / "class" / "dangling.jpg").symlink_to(root / "nowhere")
    os.mkfifo(root / "class" / "pipe.jpg")
    return root


def test_the_report_lists_every_file_once_and_rejects_exactly_the_bad_ones(collection: Path, tmp_path: Path) -> None:
    report = tmp_path / "report.jsonl"
    assert main(["scan", str(collection), "--report", str(report), "--workers", "2"]) == 0
    findings = [json.loads(line) for line in report.read_text("ascii").splitlines()]
    names = [entry["name"] for entry in findings]
    assert len(set(names)) == len(names) and os.fsdecode(b"caf\xe9/\xff.jpg") in names
    rejected = {entry["name"]: entry["reason"] for entry in findings if entry["status"] == "reject"}
    expected = {f"class/{name}" for name in bad_cases()} | {"class/dangling.jpg", "class/pipe.jpg"}
    assert set(rejected) == expected
    assert not any("hidden" in name or "thumbnails" in name or "twice" in name or "loop" in name for name in names)
    assert "truncated" in rejected["class/truncated.jpg"] and "truncated" in rejected["class/truncated_progressive.jpg"]
    assert "pixels" in rejected["class/bomb.png"]
    good = {entry["name"] for entry in findings if entry["status"] == "good"}
    assert good == {"class/exif1.jpg", "class/plain.jpg", "class/progressive.jpg", os.fsdecode(b"caf\xe9/\xff.jpg")}


def test_on_error_stop_names_one_file_and_still_leaves_the_report(
    collection: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "report.jsonl"
    assert main(["scan", str(collection), "--report", str(report), "--on-error", "stop", "--workers", "1"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "source/class/" in error
    assert json.loads(report.read_text().splitlines()[-1])["status"] == "reject"


@pytest.mark.parametrize(
    ("name", "data", "note"),
    [
        ("a.JPEG", png_bytes(corner_image()), "PNG named .jpeg"),
        ("a.jpg", good_cases()["exif6.jpg"], "EXIF orientation 6"),
        ("a.jpg", twice_oriented_jpeg(1, 1), "several EXIF segments"),
        ("a.jpg", good_cases()["stray.jpg"], "stray bytes between JPEG segments"),
        ("a.jpg", good_cases()["cmyk.jpg"], "CMYK"),
        ("a.png", good_cases()["palette.png"], "palette"),
        ("a.png", png_bytes(corner_image().convert("LA")), "transparency"),
        ("a.png", png_bytes(Image.fromarray(np.arange(4096, dtype=np.uint16).reshape(64, 64) * 16)), "16-bit grey"),
        ("a.png", png_bytes(corner_image().convert("1")), "black and white"),
    ],
)
def test_oddities_are_named(name: str, data: bytes, note: str, tmp_path: Path) -> None:
    found = finding(tmp_path / name, data)
    assert found.status == "repair" and note in found.notes


def test_grey_jpegs_are_plain(tmp_path: Path) -> None:
    assert finding(tmp_path / "a.jpg", jpeg_bytes(corner_image().convert("L"))).status == "good"


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "an empty file"),
        (b"\n<html>", "a web page or XML"),
        (b"<?xml version='1.0'?><svg/>", "a web page or XML"),
        (bomb_png(20_000), "pixels"),
        (png_bytes(corner_image())[:-30], "truncated"),
    ],
)
def test_reasons_say_what_is_wrong(data: bytes, reason: str, tmp_path: Path) -> None:
    found = finding(tmp_path / "a.jpg", data)
    assert found.status == "reject" and reason in found.reason


def test_scan_and_convert_share_one_limit(tmp_path: Path) -> None:
    for size in ((70_000, 2), (2, 70_000), (13_500, 13_500)):
        found = finding(tmp_path / "a.png", png_bytes(Image.new("1", size)))
        for settings in (Settings(), Settings(shorter_side=1)):
            assert encode(FileBytes(str(tmp_path / "a.png")), settings) == found.reason != ""


def test_the_limit_on_pixels_is_an_option(tmp_path: Path) -> None:
    assert "6,143" in finding(tmp_path / "a.jpg", jpeg_bytes(corner_image()), 96 * 64 - 1).reason
    assert finding(tmp_path / "a.jpg", jpeg_bytes(corner_image()), 96 * 64).status == "good"


def test_huge_images_are_scanned_in_bounded_memory_by_several_workers(tmp_path: Path) -> None:
    root = tmp_path / "source" / "class"
    root.mkdir(parents=True)
    data = jpeg_bytes(Image.new("RGB", (13_000, 13_000), "red"), quality=50)
    for number in range(4):
        (root / f"{number}.jpg").write_bytes(data)

    script = (
        "import resource, sys; from loaders.prep.cli import main;"
        "code = main(['scan', sys.argv[1], '--workers', '2']);"
        "print('peak', resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss); sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", script, str(root.parent)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "4 good" in done.stdout, done.stderr
    assert int(done.stdout.split("peak")[1]) < 1_500_000  # kB, of the largest worker


def test_scanning_never_needs_torch_or_a_gpu_library(tmp_path: Path) -> None:
    write_all(tmp_path / "source" / "class", {"a.jpg": jpeg_bytes(corner_image())})
    script = (
        "import sys; from loaders.prep.cli import main; code = main(['scan', sys.argv[1]]);"
        "heavy = {'torch', 'ffcv', 'nvidia.dali', 'numba', 'pyarrow'} & set(sys.modules);"
        "sys.exit(code or bool(heavy) and str(heavy))"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path / "source")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_pillows_global_switches_are_left_alone() -> None:
    from PIL import ImageFile

    assert Image.MAX_IMAGE_PIXELS == 89_478_485 and not ImageFile.LOAD_TRUNCATED_IMAGES
