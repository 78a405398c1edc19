"""Damaged EXIF: whatever an image's header says, all loaders turn it alike."""

import struct
import tempfile
import zlib
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.loading import grey_levels
from helpers.prep_cases import corner_image, jpeg_bytes, png_bytes, without_record, write_all
from PIL import Image, ImageOps

from loaders.datasets.dataset import ImageDataset, open_folder
from loaders.datasets.file_reader import GOOD, judge
from loaders.datasets.stored import open_stored
from loaders.open import LoaderName, open_loader
from loaders.prep.convert import convert
from loaders.prep.encode import Settings
from loaders.prep.sources import open_source
from loaders.views.order import BatchOrder
from loaders.views.plan import ViewPlan

SIZES = ((64, 64), (96, 64))
PREFIX = b"Exif\0\0"


def tiff(entries: list[tuple[int, int, int, int]], order: str = "<") -> bytes:
    """One directory of (tag, type, count, value in two bytes)."""
    start = (b"II*\0" if order == "<" else b"MM\0*") + struct.pack(f"{order}IH", 8, len(entries))
    return start + b"".join(struct.pack(f"{order}HHIHH", *entry, 0) for entry in entries) + bytes(4)


def jpeg_with(*segments: bytes, size: tuple[int, int] = SIZES[0]) -> bytes:
    data = jpeg_bytes(corner_image(size))
    return data[:2] + b"".join(b"\xff\xe1" + struct.pack(">H", len(part) + 2) + part for part in segments) + data[2:]


def png_with(exif: bytes, behind_pixels: bool) -> bytes:
    data = png_bytes(corner_image(SIZES[0]))
    chunk = struct.pack(">I", len(exif)) + b"eXIf" + exif + struct.pack(">I", zlib.crc32(b"eXIf" + exif))
    at = data.index(b"IEND") - 4 if behind_pixels else data.index(b"IDAT") - 4
    return data[:at] + chunk + data[at:]


def shown(name: LoaderName, images: ImageDataset) -> torch.Tensor:
    """The whole images, side by side."""
    plan, order = (
        ViewPlan(32, contrastive=(), original="center", lengths=()),
        BatchOrder(len(images), len(images), shuffle=False),
    )
    loader = open_loader(name, images, plan, order, workers=0 if name == "torch" else 2)
    (batch,) = loader.epoch(0)
    loader.close()
    return batch.original


def assert_alike(files: list[bytes]) -> None:
    with tempfile.TemporaryDirectory() as place:
        root = Path(place, "images")
        write_all(root / "a", {f"{number:02}.img": content for number, content in enumerate(files)})
        images = open_folder(root, quiet=True)
        expected = shown("torch", images)
        pictures = {"dali": shown("dali", images)}
        convert(open_source(root), Path(place, "x.beton"), "beton", Settings(), workers=1)
        stored = open_stored(Path(place, "x.beton"))
        pictures |= {f"{name} from .beton": shown(name, stored) for name in ("torch", "dali")}  # type: ignore[arg-type]
        if find_spec("ffcv"):
            pictures["ffcv"] = shown("ffcv", stored)
        for name, picture in pictures.items():
            for number, content in enumerate(files):
                assert grey_levels(expected[number], picture[number]) < 12, (name, content[:80])


@pytest.mark.parametrize(
    ("content", "alike"),
    [
        *((jpeg_with(PREFIX + tiff([(0x112, 3, 1, 6)], order)), True) for order in "<>"),
        (jpeg_with(PREFIX + tiff([(0x112, 3, 1, 1), (0x100, 3, 1, 64)])), True),
        (jpeg_with(PREFIX + tiff([(0x100, 3, 1, 64)])), True),
        (jpeg_with(PREFIX + PREFIX + tiff([(0x112, 3, 1, 6)])), False),  # Pillow turns it, DALI does not
        (jpeg_with(PREFIX + tiff([(0x112, 3, 0, 6)])), False),  # DALI turns it, Pillow does not
        (jpeg_with(PREFIX + tiff([(0x112, 4, 1, 6)])), False),
        (jpeg_with(PREFIX + tiff([(0x112, 3, 1, 6), (0x112, 3, 1, 3)])), False),
        (jpeg_with(PREFIX + tiff([(0x112, 3, 1, 6), (0x10F, 2, 99, 9999)])), False),
        (jpeg_with(PREFIX + tiff([(0x112, 3, 1, 9)])), False),
        (jpeg_with(PREFIX + tiff([(0x112, 3, 1, 6)])[:20]), False),
        (jpeg_with(PREFIX), False),
        (png_bytes(corner_image()), True),
        *((png_with(tiff([(0x112, 3, 1, 6)]), behind), False) for behind in (True, False)),
    ],
)  # fmt: skip
def test_who_may_decode_it(content: bytes, alike: bool) -> None:
    with Image.open(BytesIO(content)) as image:
        height, width = ImageOps.exif_transpose(image).size[::-1]
    assert (judge(np.frombuffer(content, np.uint8), height, width) == GOOD) == alike


def test_known_cases_look_the_same_everywhere() -> None:
    turned = tiff([(0x112, 3, 1, 6)])
    segments = [
        PREFIX + PREFIX + turned,
        PREFIX + tiff([(0x112, 3, 0, 6)]),
        PREFIX + turned,
        b"Exif\0X" + turned,
        turned,
    ]
    files = [jpeg_with(segment, size=size) for segment in segments for size in SIZES]
    assert_alike([*files, png_with(turned, True), png_with(turned, False)])


@pytest.mark.parametrize("loader", ["dali", pytest.param("ffcv", marks=pytest.mark.ffcv)])
def test_turned_jpegs_of_other_writers(loader: LoaderName, tmp_path: Path) -> None:
    """A writer that keeps JPEGs as they are keeps their EXIF and XMP."""
    if loader == "ffcv":
        pytest.importorskip("ffcv", reason="needs the ffcv extra", exc_type=ImportError)
    exif = PREFIX + tiff([(0x112, 3, 1, 1)])
    xmp = [b"http://ns.adobe.com/xap/1.0/\0<x tiff:Orientation%s" % text for text in (b'="1"/>', b">1</x>", b">1")]
    write_all(tmp_path / "source", {f"{i}.jpg": jpeg_with(part) for i, part in enumerate([exif, exif, *xmp])})
    path = tmp_path / "x.beton"
    convert(open_source(tmp_path / "source"), path, "beton", Settings(), workers=1)
    images = open_stored(path)
    data, starts = without_record(path.read_bytes()), images.file.beton.table["data_ptr"].tolist()
    for start in starts[1:]:
        tag = data.find(b"\x12\x01\3\0", start, start + 100)
        value = tag + 8 if tag > 0 else data.index(b"1", data.index(b"Orientation", start))
        data[value] += 5  # 6
    path.write_bytes(data)
    images = open_stored(path)
    expected, picture = shown("torch", images), shown(loader, images)
    assert [grey_levels(expected[0], expected[i]) > 50 for i in range(5)] == [False, True, True, True, True]
    for number in range(5):
        assert grey_levels(expected[number], picture[number]) < 12, number
