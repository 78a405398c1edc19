"""Encode an image for storage: its own bytes where possible, else a new JPEG.

A JPEG that every decoder shows upright and in the right colours, and that needs no resize, keeps its bytes. Anything
else goes through :mod:`loaders.datasets.decode`. Nothing is enlarged. Every image is decoded here, so that a damaged
one is found now and not in training.
"""

import zlib
from dataclasses import dataclass
from io import BytesIO

from PIL import Image

from loaders.datasets.beton import JPEG, LARGEST_SIDE, RAW
from loaders.datasets.decode import MAX_PIXELS, Header, ImageFault, decode_file, describe, read_header
from loaders.errors import no_fault_of_a_file
from loaders.prep.byte_ranges import Locator
from loaders.prep.pool import one_at_a_time


@dataclass(frozen=True)
class Settings:
    """Settings of a conversion."""

    shorter_side: int | None = None  # pixels, to which that of larger images shrinks; None keeps sizes
    quality: int = 95  # of JPEGs that must be encoded anew, 1 to 100
    raw: bool = False  # store pixels instead of JPEG
    max_pixels: int = MAX_PIXELS  # a larger image is unusable


@dataclass(frozen=True)
class Encoded:
    """Stored image: its bytes, FFCV's mode, and CRC-32s of source and stored bytes."""

    data: bytes
    mode: int
    height: int
    width: int
    source_crc: int
    crc: int
    treatment: str  # "kept", "resized", "repaired" or "raw"


def encode(place: Locator, settings: Settings) -> Encoded | str:
    """Read and encode one image, or return the reason why it is unusable."""
    try:
        return _encode(place.read(), settings)
    except (ImageFault, OSError) as fault:
        if no_fault_of_a_file(fault):
            raise
        return describe(fault)
    except MemoryError:
        return "too large for this machine's memory"


def _encode(data: bytes, settings: Settings) -> Encoded:
    source_crc = zlib.crc32(data)
    header = storable_header(data, settings.max_pixels)
    size = target_size(header.width, header.height, settings.shorter_side)
    shrinks = size != (header.width, header.height)
    if header.upright_jpeg and not shrinks and not settings.raw:
        _read_through(data)
        return Encoded(data, JPEG, header.height, header.width, source_crc, source_crc, "kept")
    with one_at_a_time(header.height * header.width):
        image = decode_file(BytesIO(data))
        if shrinks:
            image = image.resize(size, Image.Resampling.BICUBIC)
    if settings.raw:
        stored = image.tobytes()
        return Encoded(stored, RAW, image.height, image.width, source_crc, zlib.crc32(stored), "raw")
    buffer = BytesIO()
    # Colour at half resolution is usual and fast to decode; an image of full size keeps its colour edges.
    image.save(buffer, "JPEG", quality=settings.quality, subsampling="4:2:0" if shrinks else "4:4:4")
    stored, treatment = buffer.getvalue(), "resized" if shrinks else "repaired"
    return Encoded(stored, JPEG, image.height, image.width, source_crc, zlib.crc32(stored), treatment)


def storable_header(data: bytes, max_pixels: int) -> Header:
    """Read an image file's header. ImageFault if it is none, or too large."""
    header = read_header(BytesIO(data))
    if header.height * header.width > max_pixels:
        raise ImageFault(f"{header.width} x {header.height} pixels are more than the limit of {max_pixels:,}")
    if max(header.height, header.width) > LARGEST_SIDE:
        raise ImageFault(f"{header.width} x {header.height} pixels: no side may exceed {LARGEST_SIDE:,}")
    return header


def target_size(width: int, height: int, shorter_side: int | None) -> tuple[int, int]:
    """Return (width, height) with the shorter side reduced to ``shorter_side``."""
    shorter = min(width, height)
    if shorter_side is None or shorter <= shorter_side:
        return width, height
    return max(1, round(width * shorter_side / shorter)), max(1, round(height * shorter_side / shorter))


def _read_through(data: bytes) -> None:
    """Raise :class:`ImageFault` if a JPEG is truncated."""
    try:
        with Image.open(BytesIO(data)) as image:
            image.draft("L", (1, 1))
            image.load()
    except Exception as fault:  # as in decode_file
        raise ImageFault(f"truncated or damaged image ({fault})") from fault
