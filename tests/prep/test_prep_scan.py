"""A scan finds what is wrong or odd in a collection, names it, and survives it."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from helpers.prep_cases import (
    Prep,
    bad_cases,
    bomb_png,
    corner_image,
    good_cases,
    jpeg_bytes,
    png_bytes,
    write_all,
)  # fmt: skip
from PIL import Image, ImageFile

from loaders.prep.byte_ranges import FileBytes
from loaders.prep.encode import Settings, encode
from loaders.prep.scan import Finding, examine

LIMIT = 178_000_000
GOOD, PLAIN = good_cases(), corner_image()


def finding(path: Path, data: bytes, max_pixels: int = LIMIT) -> Finding:
    path.write_bytes(data)
    return examine(path.name, FileBytes(str(path)), max_pixels)


def test_a_report_lists_every_file_once(prep: Prep, tmp_path: Path) -> None:
    """Good, odd and bad ones, but no names that are no images at all."""
    report, root = tmp_path / "report.jsonl", tmp_path / "source"
    odd = os.fsdecode(b"caf\xe9/\xff.jpg")
    write_all(root / "class", GOOD | bad_cases())
    write_all(root, {"class/.hidden/x.jpg": b"", ".thumbnails/x.jpg": jpeg_bytes(PLAIN), odd: jpeg_bytes(PLAIN)})
    (root / "class" / "loop").symlink_to(root)
    (root / "class" / "twice.jpg").symlink_to(root / "class" / "plain.jpg")
    (root / "class" / "dangling.jpg").symlink_to(root / "nowhere")
    os.mkfifo(root / "class" / "pipe.jpg")
    prep("scan", root, "--report", report, "--workers", 2)
    findings = [json.loads(line) for line in report.read_text("ascii").splitlines()]
    names = [entry["name"] for entry in findings]
    assert len(set(names)) == len(names)
    assert not any("hidden" in name or "thumbnails" in name or "twice" in name or "loop" in name for name in names)
    rejected = {entry["name"]: entry["reason"] for entry in findings if entry["status"] == "reject"}
    assert set(rejected) == {f"class/{name}" for name in (*bad_cases(), "dangling.jpg", "pipe.jpg")}
    assert "truncated" in rejected["class/truncated.jpg"] and "truncated" in rejected["class/truncated_progressive.jpg"]
    assert "pixels" in rejected["class/bomb.png"]
    good = {entry["name"] for entry in findings if entry["status"] == "good"}
    assert good == {f"class/{name}.jpg" for name in ("exif1", "plain", "progressive", "stray")} | {odd}

    code, _, error = prep.run("scan", root, "--report", report, "--force", "--on-error", "stop")
    assert code == 2 and error.count("\n") == 1 and "source/class/" in error
    assert json.loads(report.read_text().splitlines()[-1])["status"] == "reject"


@pytest.mark.parametrize(
    ("name", "data", "note"),
    [
        ("a.JPEG", png_bytes(PLAIN), "PNG named .jpeg"), ("a.jpg", GOOD["exif6.jpg"], "EXIF orientation 6"),
        ("a.jpg", GOOD["cmyk.jpg"], "CMYK"), ("a.png", GOOD["palette.png"], "palette"),
        ("a.png", png_bytes(PLAIN.convert("LA")), "transparency"),
        ("a.png", png_bytes(PLAIN.convert("1")), "black and white"),
        ("a.png", png_bytes(Image.fromarray(np.arange(4096, dtype=np.uint16).reshape(64, 64) * 16)), "16-bit grey"),
    ],
)  # fmt: skip
def test_oddities_are_named(name: str, data: bytes, note: str, tmp_path: Path) -> None:
    found = finding(tmp_path / name, data)
    assert found.status == "repair" and note in found.notes


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "an empty file"), (b"\n<html>", "a web page or XML"), (b"<?xml version='1.0'?><svg/>", "a web page"),
        (bomb_png(20_000), "pixels"), (png_bytes(PLAIN)[:-30], "truncated"),
    ],
)  # fmt: skip
def test_reasons_say_what_is_wrong(data: bytes, reason: str, tmp_path: Path) -> None:
    found = finding(tmp_path / "a.jpg", data)
    assert found.status == "reject" and reason in found.reason


def test_scan_and_convert_share_one_limit(tmp_path: Path) -> None:
    for size in ((70_000, 2), (2, 70_000), (13_500, 13_500)):
        found = finding(tmp_path / "a.png", png_bytes(Image.new("1", size)))
        for settings in (Settings(), Settings(shorter_side=1)):
            assert encode(FileBytes(str(tmp_path / "a.png")), settings) == found.reason != ""
    assert "6,143" in finding(tmp_path / "a.jpg", jpeg_bytes(PLAIN), 96 * 64 - 1).reason
    assert finding(tmp_path / "a.jpg", jpeg_bytes(PLAIN), 96 * 64).status == "good"
    assert finding(tmp_path / "a.jpg", jpeg_bytes(PLAIN.convert("L"))).status == "good"  # grey JPEGs are plain
    assert Image.MAX_IMAGE_PIXELS == 89_478_485 and not ImageFile.LOAD_TRUNCATED_IMAGES  # Pillow's are left alone
