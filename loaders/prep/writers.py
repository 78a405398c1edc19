"""Writers of prepared sets: ``.beton`` files and class folders of images.

FFCV's own writer waits for ever if a worker dies, and its layout depends on which worker was faster.
"""

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

import numpy as np

from loaders.datasets.beton import ALLOCATION, FIELD, HEADER, SAMPLE, VERSION, field_descriptors
from loaders.datasets.manifest import FOLDER_RECORD, Record
from loaders.errors import UserError
from loaders.text import printable

SMALLEST_PAGE = 1 << 23  # FFCV's default; no image may cross the boundary of a page
LARGEST_PAGE = 1 << 31


class BetonWriter:
    """Writer of a ``.beton`` file of at most ``capacity`` images, in order of arrival."""

    def __init__(self, path: Path, capacity: int) -> None:
        self._file: BinaryIO = path.open("wb", buffering=1 << 20)
        self._page = SMALLEST_PAGE
        self._position = HEADER.itemsize + 2 * FIELD.itemsize + capacity * SAMPLE.itemsize
        self._stored = np.zeros(capacity, ALLOCATION)
        self._count = 0

    def add(self, name: str, data: bytes) -> None:
        """Append an image's bytes."""
        # When pages grow, earlier images still cross no boundary: every boundary of the larger pages was one before.
        while len(data) > self._page:
            self._page *= 2
            if self._page > LARGEST_PAGE:
                raise UserError(f"{printable(name)}: {len(data):,} bytes are too many for a .beton file; shrink it")
        if self._position % self._page + len(data) > self._page:
            self._position = -(-self._position // self._page) * self._page
        self._file.seek(self._position)
        self._file.write(data)
        self._stored[self._count] = (0, self._position, len(data))
        self._position += len(data)
        self._count += 1

    def finish(self, order: np.ndarray, modes: np.ndarray, record: Record) -> None:
        """Write rows, index and header. Row i is the ``order[i]``-th added image."""
        allocations = self._stored[order]
        allocations["sample_id"] = np.arange(len(order))
        table = np.zeros(len(order), SAMPLE)
        table["mode"], table["label"], table["data_ptr"] = modes, record.labels, allocations["ptr"]
        table["height"], table["width"] = record.sizes.T
        facts = record.facts | {"page_size": self._page, "table": hashlib.sha256(table.tobytes()).hexdigest()}
        block = replace(record, facts=facts).to_bytes()
        header = np.zeros(1, HEADER)
        header[0] = (VERSION, 2, self._page, len(order), self._position + len(block))
        with self._file as file:
            file.seek(self._position)
            file.write(block + allocations.tobytes())
            file.seek(HEADER.itemsize)
            file.write(field_descriptors((self._position, len(block))).tobytes() + table.tobytes())
            file.flush()
            file.seek(0)  # last, so that an incomplete file is never a valid one
            file.write(header.tobytes())

    def close(self) -> None:
        """Close the file, complete or not."""
        self._file.close()


class FolderWriter:
    """Writer of class folders and their record, below an existing, empty folder."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._folders: set[str] = set()

    def add(self, name: str, data: bytes) -> None:
        """Write one image."""
        folder = name.rpartition("/")[0]
        if folder not in self._folders:
            (self._root / folder).mkdir(parents=True, exist_ok=True)
            self._folders.add(folder)
        try:
            with (self._root / name).open("xb") as file:
                file.write(data)
        except FileExistsError:  # on a file system that ignores case
            raise UserError(f"{printable(name)}: another image has this name here; rename one") from None

    def finish(self, order: np.ndarray, modes: np.ndarray, record: Record) -> None:
        """Write the record; ``order`` and ``modes`` do not matter here."""
        for name in record.classes:
            (self._root / name).mkdir(exist_ok=True)  # a class may be empty
        (self._root / FOLDER_RECORD).write_bytes(record.to_bytes())

    def close(self) -> None:
        """Do nothing: no file is held open."""
