"""Image files of the kinds that large collections hold, some damaged on purpose, and the command ``cocor-prep``."""

import struct
import zlib
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from helpers.hostile import time_limit
from loaders.datasets.beton import HEADER, field_descriptors
from loaders.prep.cli import main

CORNERS = {"red": (255, 0, 0), "green": (0, 160, 0), "blue": (0, 0, 255), "yellow": (255, 255, 0)}  # clockwise


def corner_image(size: tuple[int, int] = (96, 64)) -> Image.Image:
    """Four coloured quarters: red top left, green top right, blue bottom right, yellow bottom left."""
    width, height = size
    pixels = np.zeros((height, width, 3), np.uint8)
    red, green, blue, yellow = CORNERS.values()
    pixels[: height // 2, : width // 2], pixels[: height // 2, width // 2 :] = red, green
    pixels[height // 2 :, width // 2 :], pixels[height // 2 :, : width // 2] = blue, yellow
    return Image.fromarray(pixels)


def corner_colours(image: Image.Image) -> np.ndarray:
    """(4, 3): mean colours well inside the four quarters, clockwise from the top left."""
    pixels = np.asarray(image.convert("RGB"), np.float64)
    height, width = pixels.shape[:2]
    y, x = height // 8, width // 8
    patches = [(y, x), (y, width - 2 * x), (height - 2 * y, width - 2 * x), (height - 2 * y, x)]
    return np.array([pixels[top : top + y, left : left + x].mean((0, 1)) for top, left in patches])


def jpeg_bytes(image: Image.Image, **options: object) -> bytes:
    buffer = BytesIO()
    image.save(buffer, "JPEG", **({"quality": 95, "subsampling": 0} | options))
    return buffer.getvalue()


def png_bytes(image: Image.Image) -> bytes:
    buffer = BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def oriented_jpeg(orientation: int) -> bytes:
    """The corner image stored turned, with the EXIF tag that turns it upright."""
    turns = {
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_90,
        7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_270,
    }
    image = corner_image()
    exif = Image.Exif()
    exif[0x0112] = orientation
    return jpeg_bytes(image.transpose(turns[orientation]) if orientation in turns else image, exif=exif)


def twice_oriented_jpeg(first: int, second: int) -> bytes:
    """As :func:`oriented_jpeg` with ``first``, before another EXIF segment. Of 6 and 3 DALI's decoder crashes."""
    one, other = oriented_jpeg(first), oriented_jpeg(second)
    at = other.index(b"\xff\xe1")
    segment = other[at : at + 2 + int.from_bytes(other[at + 2 : at + 4], "big")]
    behind = one.index(b"\xff\xdb")  # the quantisation tables follow the headers
    return one[:behind] + segment + one[behind:]


def stray_jpeg() -> bytes:
    """A JPEG with bytes between two of its segments."""
    return jpeg_bytes(corner_image()).replace(b"\xff\xdb", b"stray\xff\xdb", 1)


def ycck_jpeg() -> bytes:
    """A CMYK JPEG as Adobe's programs write it: inverted, stored as YCCK."""
    data = jpeg_bytes(corner_image().convert("CMYK"))
    at = data.index(b"Adobe")
    assert data[at + 11] in (0, 2)
    return data


def bomb_png(side: int) -> bytes:
    """A few bytes that claim ``side`` x ``side`` grey pixels."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0")) + chunk(b"IEND", b"")


def good_cases() -> dict[str, bytes]:
    """Readable images that show the corner colours, by file name."""
    image = corner_image()
    cases = {f"exif{i}.jpg": oriented_jpeg(i) for i in range(1, 9)}
    cases["stray.jpg"] = stray_jpeg()
    cases["two_exifs.jpg"] = twice_oriented_jpeg(6, 3)
    cases["plain.jpg"] = jpeg_bytes(image)
    cases["progressive.jpg"] = jpeg_bytes(image, progressive=True)
    cases["cmyk.jpg"] = ycck_jpeg()
    cases["really_png.JPEG"] = png_bytes(image)
    cases["palette.png"] = png_bytes(image.quantize(4))
    transparent = image.convert("RGBA")
    transparent.putalpha(Image.new("L", image.size, 255))
    cases["alpha.png"] = png_bytes(transparent)
    return cases


def bad_cases() -> dict[str, bytes]:
    """Unusable files by name."""
    photo = jpeg_bytes(Image.fromarray(np.random.default_rng(0).integers(0, 256, (80, 80, 3), np.uint8)))
    return {
        "truncated.jpg": photo[: len(photo) // 2],
        "truncated_progressive.jpg": jpeg_bytes(corner_image((640, 480)), progressive=True)[:2000],
        "empty.jpg": b"",
        "page.jpg": b"<!DOCTYPE html><html><body>404 not found</body></html>",
        "bomb.png": bomb_png(60_000),
        "noise.jpg": bytes(range(256)) * 8,
    }


def write_all(folder: Path, files: dict[str, bytes]) -> None:
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)


def without_record(data: bytes) -> bytearray:
    """A .beton as FFCV's own writer makes it: no checksums, no digests."""
    changed = bytearray(data)
    fields = field_descriptors((0, 0))
    fields["arguments"] = 0
    changed[HEADER.itemsize : HEADER.itemsize + fields.nbytes] = fields.tobytes()
    return changed


class Prep:
    """Runs ``cocor-prep``; with one worker, as starting more takes longer than most tests."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *words: object) -> str:
        """What a command prints that must succeed."""
        code, out, error = self.run(*words)
        assert code == 0, error
        return out

    def refused(self, *words: object) -> str:
        """The one line of a command that must be refused."""
        code, out, error = self.run(*words)
        assert code == 2 and error.startswith("cocor-prep: ") and error.count("\n") == 1 and not out
        return error

    def run(self, *words: object) -> tuple[int, str, str]:
        """Exit code, output and errors of a command."""
        arguments = list(map(str, words))
        if words and words[0] in ("scan", "convert", "subset", "verify") and "--workers" not in arguments:
            arguments += ["--workers", "1"]
        self._capsys.readouterr()
        with time_limit():
            code = main(arguments)
        return code, *self._capsys.readouterr()
