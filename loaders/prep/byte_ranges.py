"""Locators: where one image's bytes lie, small enough to send to workers.

``read`` returns the bytes of the image, and raises :class:`ImageFault` or :class:`OSError`.
"""

import functools
import os
from dataclasses import dataclass
from typing import Any

from loaders.datasets.decode import ImageFault
from loaders.files import without_waiting

LARGEST_FILE = 1 << 28  # bytes: no photograph needs more, and workers must not run out of memory
_LARGEST_GROUP = 1 << 31


@dataclass(frozen=True)
class FileBytes:
    """Whole file."""

    path: str

    def read(self) -> bytes:
        with open(self.path, "rb", opener=without_waiting) as file:
            _check_length(os.fstat(file.fileno()).st_size)
            return file.read(LARGEST_FILE)


@dataclass(frozen=True)
class ByteRange:
    """Range of bytes of another file, such as an uncompressed tar."""

    path: str
    offset: int
    length: int

    def read(self) -> bytes:
        _check_length(self.length)
        with open(self.path, "rb", buffering=0) as file:  # noqa: PTH123
            data = os.pread(file.fileno(), self.length, self.offset)
        if len(data) != self.length:
            raise ImageFault("the file that holds it ends too early")
        return data


@dataclass(frozen=True)
class RawPixels:
    """RGB pixels in a file, read as if they were a PPM file."""

    path: str
    offset: int
    height: int
    width: int

    def read(self) -> bytes:
        length = self.height * self.width * 3
        return b"P6 %d %d 255\n" % (self.width, self.height) + ByteRange(self.path, self.offset, length).read()


@dataclass(frozen=True)
class ParquetBytes:
    """Row of a parquet file whose column holds image files."""

    path: str
    column: str
    group: int
    row: int  # in the group

    def read(self) -> bytes:
        try:
            value = _row_group(self.path, self.column, self.group)[self.row].as_py()
        except (ImageFault, MemoryError):
            raise
        except Exception as fault:  # pyarrow raises many kinds on damaged files
            raise ImageFault(f"damaged parquet data ({str(fault).partition(chr(10))[0]})") from fault
        data = value.get("bytes") if isinstance(value, dict) else value
        if not data:
            raise ImageFault("no image bytes in this row")
        _check_length(len(data))
        return data


Locator = FileBytes | ByteRange | RawPixels | ParquetBytes


@functools.lru_cache(maxsize=1)
def _row_group(path: str, column: str, group: int) -> Any:
    import pyarrow.parquet as parquet

    with parquet.ParquetFile(path) as file:
        about = file.metadata.row_group(group)
        parts = [about.column(i) for i in range(about.num_columns)]
        length = sum(part.total_uncompressed_size for part in parts if part.path_in_schema.startswith(column))
        if length > _LARGEST_GROUP:
            raise ImageFault(f"{length:,} bytes in one row group are more than the limit of {_LARGEST_GROUP:,}")
        return file.read_row_group(group, columns=[column]).column(column).combine_chunks()


def _check_length(length: int) -> None:
    if length == 0:
        raise ImageFault("an empty file")
    if length > LARGEST_FILE:
        raise ImageFault(f"{length:,} bytes are more than the limit of {LARGEST_FILE:,}")
