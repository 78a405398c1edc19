"""File format of FFCV (``.beton``, version 2), read and described without FFCV.

    header · field descriptors · one row a sample · stored images · cocor's index · allocation table

A file made by ``cocor-prep`` carries a :class:`loaders.datasets.manifest.Record` between images and allocation table;
the otherwise unused arguments of the image field say where. FFCV's own loader ignores it, and a file without it (made
by FFCV's writer) is read as well, with numbers for names and classes.

The layout follows the published format; a test holds it against FFCV's own reader.
"""

import hashlib
import mmap
import os
import struct
import zlib
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from loaders.datasets.manifest import Record
from loaders.errors import UnusableImage, UserError
from loaders.files import open_regular
from loaders.text import printable

VERSION = 2
HEADER = np.dtype("<u2, <u2, <u4, <u8, <u8")
HEADER.names = ("version", "num_fields", "page_size", "num_samples", "alloc_table_ptr")
FIELD = np.dtype([("type_id", "u1"), ("name", "u1", (16,)), ("arguments", "u1", (1024,))])
SAMPLE = np.dtype(
    {
        "names": ["mode", "width", "height", "data_ptr", "label"],
        "formats": ["u1", "<u2", "<u2", "<u8", "<i8"],
        "offsets": [0, 1, 3, 5, 16],
        "itemsize": 24,
    }
)
ALLOCATION = np.dtype([("sample_id", "<u8"), ("ptr", "<u8"), ("size", "<u8")])
INT_FIELD, IMAGE_FIELD = 1, 2  # type_id
JPEG, RAW = 0, 1  # mode
FIELD_NAMES = ("image", "label")
LARGEST_SIDE = 65535
SPARE_CLASSES = 22_000  # allowed in a file without class names, however few its images: as many as ImageNet-21K has
_READ_AHEAD = 128 << 10  # bytes that a system reads ahead at a time; of a larger request it reads no more
POINTER = struct.Struct("<16sQQ")  # in the image field's arguments: marker, offset and length of the record
MARKER = b"cocor-prep\0\0\0\0\0\0"


@dataclass(frozen=True, eq=False)
class Beton:
    """An open ``.beton`` file of N images: ImageDataset's fields, and the bytes.

    ``table``: SAMPLE (N,); ``sizes_in_bytes``: int64 (N,); ``record``: cocor-prep's, None for other programs' files.
    """

    root: Path
    page_size: int
    table: np.ndarray
    sizes_in_bytes: npt.NDArray[np.int64]
    record: Record | None
    data: mmap.mmap

    def __len__(self) -> int:
        return len(self.table)

    @cached_property
    def names(self) -> list[str]:
        """Return relative names; numbers if the file has no record."""
        return self.record.names if self.record else [f"{i:08d}" for i in range(len(self))]

    @cached_property
    def labels(self) -> npt.NDArray[np.int64]:
        """Return places in ``classes``, -1 for none: int64 (N,)."""
        return self.table["label"].astype(np.int64)

    @cached_property
    def classes(self) -> list[str]:
        """Return class names; without a record, zero-padded numbers of all labels."""
        if self.record:
            return self.record.classes
        count = int(self.labels.max(initial=-1)) + 1
        return [str(i).zfill(len(str(count - 1))) for i in range(count)]

    @cached_property
    def sizes(self) -> npt.NDArray[np.int32]:
        """Return height and width of the stored, upright images: int32 (N, 2)."""
        return np.stack([self.table["height"], self.table["width"]], axis=1).astype(np.int32)

    def read(self, index: int) -> memoryview:
        """Return the stored bytes, not copied: a JPEG, or raw pixels (H, W, 3)."""
        start = int(self.table["data_ptr"][index])
        return memoryview(self.data)[start : start + int(self.sizes_in_bytes[index])]

    def read_ahead(self, rows: npt.NDArray[np.int64]) -> None:
        """Have the system begin to read the stored bytes of ``rows``.

        Otherwise whoever decodes an image waits once or twice for a disk that is slow to answer.
        """
        starts, sizes = self.table["data_ptr"][rows].tolist(), self.sizes_in_bytes[rows].tolist()
        with suppress(OSError):  # it is a hint only
            for start, size in zip(starts, sizes, strict=True):
                for at in range(start - start % mmap.PAGESIZE, start + size, _READ_AHEAD):
                    self.data.madvise(mmap.MADV_WILLNEED, at, min(_READ_AHEAD, start + size - at))

    def check(self, index: int) -> None:
        """Check an image's stored bytes. UnusableImage naming it if they differ."""
        if self.record is not None and zlib.crc32(self.read(index)) != int(self.record.crcs[index]):
            raise UnusableImage(
                f"{printable(self.root)}: {printable(self.names[index])} (image {index}) is damaged: "
                "its checksum differs; run cocor-prep convert again"
            )


def is_beton(path: str | os.PathLike[str]) -> bool:
    """Tell whether a path names a ``.beton`` file, damaged or not, by its suffix."""
    return Path(path).suffix.lower() == ".beton"


def open_beton(path: str | os.PathLike[str]) -> Beton:
    """Open a file and check that it is complete. UserError naming it if not."""
    place = Path(path)
    try:
        with open_regular(place, "a .beton file") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as fault:
        raise UserError(f"{printable(path)}: {fault.strerror}; give a .beton file") from fault
    except ValueError:
        raise UserError(f"{printable(path)}: an empty file, not FFCV data; run cocor-prep convert again") from None
    try:
        return _parse(place, data)
    except (ValueError, IndexError, OverflowError, MemoryError, struct.error) as fault:
        raise _broken(place, "its parts do not fit the file's length") from fault


def _broken(path: Path, why: str) -> UserError:
    return UserError(f"{printable(path)}: not a complete FFCV file ({why}); run cocor-prep convert again")


def _parse(path: Path, data: mmap.mmap) -> Beton:
    header = np.frombuffer(data, HEADER, 1)[0]
    if header["version"] != VERSION:
        raise _broken(path, f"version {header['version']} instead of {VERSION}")
    fields = np.frombuffer(data, FIELD, int(header["num_fields"]), HEADER.itemsize)
    names = tuple(field["name"].tobytes().rstrip(b"\0").decode("ascii", "replace") for field in fields)
    if names != FIELD_NAMES or fields["type_id"].tolist() != [IMAGE_FIELD, INT_FIELD]:
        raise UserError(
            f"{printable(path)}: holds the fields {', '.join(names) or 'none'}; "
            "cocor reads an RGB 'image' and an integer 'label'"
        )
    count = int(header["num_samples"])
    table = np.frombuffer(data, SAMPLE, count, HEADER.itemsize + fields.nbytes)
    allocations = np.frombuffer(data, ALLOCATION, count, int(header["alloc_table_ptr"]))
    allocations = allocations[np.argsort(allocations["sample_id"], kind="stable")]
    starts, sizes = allocations["ptr"], allocations["size"]
    inside = (starts <= len(data)) & (sizes <= len(data) - np.minimum(starts, len(data)))  # sums could wrap around
    complete = np.array_equal(allocations["sample_id"], np.arange(count))
    if not complete or not np.array_equal(starts, table["data_ptr"]) or not inside.all():
        raise _broken(path, "the table of images is damaged")
    marker, offset, length = POINTER.unpack(fields["arguments"][0].tobytes()[: POINTER.size])
    record = Record.from_bytes(data[offset : offset + length], path) if marker == MARKER else None
    if record is not None:
        descriptors = field_descriptors((offset, length)).tobytes()
        stated = (record.facts.get("table"), record.facts.get("page_size"), descriptors)
        if stated != (hashlib.sha256(table.tobytes()).hexdigest(), int(header["page_size"]), fields.tobytes()):
            raise _broken(path, "header and index differ")
    _check_labels(path, table["label"], record)
    return Beton(path, int(header["page_size"]), table, sizes.astype(np.int64), record, data)


def _check_labels(path: Path, labels: np.ndarray, record: Record | None) -> None:
    """Refuse labels that are not places among the classes."""
    # A file without class names has as many classes as its largest label says, so that one must be plausible.
    most = max(len(labels), SPARE_CLASSES) if record is None else len(record.classes)
    lowest, highest = int(labels.min(initial=0)), int(labels.max(initial=-1))
    if lowest >= -1 and highest < most:
        return
    if record is not None:
        raise _broken(path, f"its labels are not within -1 to {most - 1:,}")
    raise UserError(
        f"{printable(path)}: labels from {lowest} to {highest} for {len(labels):,} images cannot number classes; "
        f"write it again with labels from 0 to {most - 1:,} (-1: none)"
    )


def field_descriptors(record_at: tuple[int, int]) -> np.ndarray:
    """Describe image and label: FIELD (2,). The record lies at (offset, length)."""
    fields = np.zeros(2, FIELD)
    for field, name, kind in zip(fields, FIELD_NAMES, (IMAGE_FIELD, INT_FIELD), strict=True):
        field["type_id"] = kind
        field["name"][: len(name)] = np.frombuffer(name.encode(), np.uint8)
    pointer: Any = np.frombuffer(POINTER.pack(MARKER, *record_at), np.uint8)
    fields["arguments"][0, : len(pointer)] = pointer
    return fields
