"""Verify a prepared data set: structure, checksums, and decoded sizes.

Works on ``.beton`` files and on folders that ``cocor-prep convert`` made. A ``.beton`` file of FFCV's own writer has
no checksums; there the coded pixels must fill the image.
"""

import os
import zlib
from contextlib import closing, suppress
from io import BytesIO
from pathlib import Path

import simplejpeg

from loaders.datasets.beton import RAW, is_beton, open_beton
from loaders.datasets.decode import ImageFault, decode_file, describe
from loaders.datasets.folder import list_folder
from loaders.datasets.manifest import read_folder_record
from loaders.errors import UserError, no_fault_of_a_file
from loaders.prep.byte_ranges import ByteRange, FileBytes, Locator
from loaders.prep.pool import in_order
from loaders.text import printable

_Check = tuple[Locator, int | None, int, int, bool]  # where, CRC-32, height, width, raw pixels


def verify(path: Path, workers: int | None = None) -> tuple[int, list[tuple[str, str]]]:
    """Count a prepared set's images, and list (name, fault) of what is damaged.

    Missing and surplus images are listed too. UserError if its structure is broken or it was not prepared by cocor.
    """
    names, checks, faults = _from_beton(path) if is_beton(path) else _from_folder(path)
    found = in_order(_check, checks.__getitem__, len(checks), workers, name=names.__getitem__, doing="verifying")
    with closing(found):
        faults += [(name, fault) for name, fault in zip(names, found, strict=True) if fault]
    return len(checks), sorted(faults)


def _check(check: _Check) -> str:
    """Return what is wrong with a stored image, "" for nothing."""
    place, crc, height, width, raw = check
    try:
        data = place.read()
        if crc is not None and zlib.crc32(data) != crc:
            return "damaged: its checksum differs"
        if crc is None and not raw and not _complete(data):
            return "damaged: its pixels do not fill the image"
        if raw:
            return "" if len(data) == height * width * 3 else "damaged: wrong number of pixels"
        image = decode_file(BytesIO(data))
    except (ImageFault, OSError) as fault:
        if no_fault_of_a_file(fault):
            raise
        return describe(fault)
    return "" if image.size == (width, height) else f"is {image.width} x {image.height}, not {width} x {height} pixels"


def _complete(data: bytes) -> bool:
    """Tell whether a JPEG has all its pixels; most decoders fill gaps in silence."""
    if data[:2] != b"\xff\xd8":
        return True
    with suppress(ValueError):
        return simplejpeg.decode_jpeg(data, "GRAY", strict=True) is not None
    return False


def _from_beton(path: Path) -> tuple[list[str], list[_Check], list[tuple[str, str]]]:
    file = open_beton(path)
    crcs = [None] * len(file) if file.record is None else file.record.crcs.tolist()
    place = str(path.absolute())
    checks: list[_Check] = [
        (ByteRange(place, int(row["data_ptr"]), int(length)), crc, *size.tolist(), row["mode"] == RAW)
        for row, length, crc, size in zip(file.table, file.sizes_in_bytes, crcs, file.sizes, strict=True)
    ]
    return file.names, checks, []


def _from_folder(path: Path) -> tuple[list[str], list[_Check], list[tuple[str, str]]]:
    if not path.is_dir():
        raise UserError(f"{printable(path)}: no such prepared set; give a .beton file or folder made by cocor-prep")
    record = read_folder_record(path)
    if record is None:
        raise UserError(f"{printable(path)}: not made by cocor-prep, so there are no checksums; use cocor-prep scan")
    surplus = sorted(set(list_folder(str(path)).names) - set(record.names))
    root = os.fspath(path.absolute())
    checks: list[_Check] = [
        (FileBytes(f"{root}/{name}"), int(crc), int(height), int(width), False)
        for name, crc, (height, width) in zip(record.names, record.crcs, record.sizes, strict=True)
    ]
    return record.names, checks, [(name, "not part of the prepared set") for name in surplus]
