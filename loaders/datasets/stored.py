"""Data set in a ``.beton`` file: a folder's fields, and the bytes of each image.

Files that cocor-prep wrote carry a checksum of every image, which is compared when the image is first read, so damage
is named instead of shown. Files of other writers have none; there a decoder must notice.
"""

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from io import BytesIO
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image

from loaders.datasets.beton import JPEG, RAW, Beton, open_beton
from loaders.datasets.dataset import SHARED, ImageDataset, number_classes, unpadded
from loaders.datasets.decode import MAX_PIXELS, ImageFault, decode_file, describe
from loaders.datasets.labels import read_labels
from loaders.errors import UnusableImage, UserError
from loaders.text import printable

_log = logging.getLogger(__name__)


class StoredFile:
    """An open ``.beton`` that compares images, by row, with their checksums once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.beton: Beton = open_beton(path)
        self._unchecked = np.full(len(self.beton), self.beton.record is not None)
        _refuse_impossible(self.beton)

    def damage(self, rows: npt.NDArray[np.int64]) -> dict[int, UnusableImage]:
        """Find what is wrong, by row, with those of ``rows`` whose bytes have changed."""
        found = {}
        for row in rows[self._unchecked[rows]].tolist():
            try:
                self.beton.check(row)
            except UnusableImage as fault:
                found[row] = fault
            else:
                self._unchecked[row] = False
        return found

    def read(self, row: int) -> memoryview:
        """Return the stored bytes: a JPEG, or pixels (H, W, 3). Raises if damaged."""
        for fault in self.damage(np.array([row])).values():
            raise fault
        return self.beton.read(row)

    def decode(self, row: int) -> Image.Image:
        """Decode an image as :mod:`loaders.datasets.decode` does. UnusableImage naming it."""
        size: tuple[int, int] = tuple(self.beton.sizes[row, ::-1].tolist())
        data = self.read(row)
        if self.beton.table["mode"][row] == RAW:
            return Image.frombytes("RGB", size, data)
        try:
            image = decode_file(BytesIO(data))
        except ImageFault as fault:
            raise self.damaged(row, describe(fault)) from fault
        if image.size != size:
            raise self.damaged(row, f"{image.width} x {image.height} pixels instead of {size[0]} x {size[1]}")
        return image

    def damaged(self, row: int, why: str) -> UnusableImage:
        """Make the error for an image that cannot be decoded."""
        return UnusableImage(
            f"{printable(self.path)}: {printable(self.beton.names[row])} (image {row}): {why}; "
            "run cocor-prep convert again"
        )


@lru_cache(maxsize=8)
def _opened(path: Path, identity: tuple[int, int, int]) -> StoredFile:
    return StoredFile(path)


def open_file(path: str | os.PathLike[str]) -> StoredFile:
    """Open the file at ``path`` once in a process, unless it has changed since."""
    place = Path(path).absolute()
    try:
        status = place.stat()
    except OSError as fault:
        raise UserError(f"{printable(path)}: {fault.strerror}; give a .beton file") from fault
    return _opened(place, (status.st_ino, status.st_size, status.st_mtime_ns))


@dataclass(frozen=True)
class StoredImage:
    """One image of a file, small enough to be sent to another process."""

    path: Path
    row: int

    def decode(self) -> Image.Image:
        return open_file(self.path).decode(self.row)


@dataclass(frozen=True, eq=False)
class StoredDataset(ImageDataset):
    """N images of the ``.beton`` file ``root``, at ``rows`` int64 (N,) of it."""

    file: StoredFile = field(kw_only=True, metadata=SHARED)
    rows: npt.NDArray[np.int64] = field(kw_only=True)

    def image(self, index: int) -> StoredImage:
        return StoredImage(self.file.path, int(self.rows[index]))


def open_stored(
    path: str | os.PathLike[str], labels: str | os.PathLike[str] | None = None, *, classes: Sequence[str] | None = None
) -> StoredDataset:
    """Open a ``.beton`` file of images.

    ``labels`` names a text file that replaces the stored labels (see :func:`loaders.datasets.labels.read_labels`);
    ``classes`` fixes the classes, such as the training set's for a validation set. Raises :class:`UserError`.
    """
    file = open_file(path)
    beton, count = file.beton, len(file.beton)
    if not count:
        raise UserError(f"{printable(path)}: holds no images; run cocor-prep convert again")
    numbers, known = beton.labels, beton.classes
    if labels is None and classes is not None and beton.record is None:  # labels without names are places
        known = list(classes)
        _check_places(Path(path), np.unique(numbers[numbers >= 0]).tolist(), known)
    elif labels is not None or classes is not None:
        found = _label_names(file, labels)
        known, numbers = number_classes(Path(path), found, [], classes, allow_empty=True, listed=labels is not None)
    plain, rows = np.ones(count, np.bool_), np.arange(count, dtype=np.int64)
    return StoredDataset(Path(path), beton.names, numbers, list(known), beton.sizes, plain, file=file, rows=rows)


def _label_names(file: StoredFile, labels: str | os.PathLike[str] | None) -> list[str | None]:
    beton = file.beton
    if labels is None:
        return [beton.classes[label] if label >= 0 else None for label in beton.labels]
    label_of, faults = read_labels(Path(labels), beton.names)
    for name, reason in faults:
        raise UserError(f"{printable(file.path)}: {printable(name)}: {reason}")
    return [label_of[i] for i in range(len(beton))]


def _check_places(path: Path, labels: list[int], known: Sequence[str]) -> None:
    """Refuse labels without names that are no places among ``known``, or may be names."""
    if labels and labels[-1] >= len(known):
        raise UserError(f"{printable(path)}: class {labels[-1]} is not among the {len(known)} known classes")
    called = {unpadded(name): place for place, name in enumerate(known)}
    named = [called.get(str(label)) for label in labels]
    if named == labels:
        return
    if None not in named:
        raise UserError(
            f"{printable(path)}: has no class names, and its labels may be names or places of the known classes; if "
            "they are names, run cocor-prep convert on it"
        )
    shown = ", ".join(f"{label} is {printable(known[label])}" for label in labels[:3])
    more = ", ..." if len(labels) > 3 else ""
    _log.info(f"{printable(path)}: has no class names; its labels are places of the known ones: {shown}{more}")


def _refuse_impossible(beton: Beton) -> None:
    """Refuse a table that does not fit the stored bytes: compiled code trusts it."""
    modes, sizes = beton.table["mode"], beton.sizes.astype(np.int64)
    raw = modes == RAW
    possible = (raw | (modes == JPEG)) & (sizes.min(axis=1, initial=1 << 16) > 0) & (beton.sizes_in_bytes > 0)
    possible &= sizes[:, 0] * sizes[:, 1] <= MAX_PIXELS
    possible &= ~raw | (beton.sizes_in_bytes == 3 * sizes[:, 0] * sizes[:, 1])
    if not possible.all():
        row = int(np.argmin(possible))
        raise UserError(
            f"{printable(beton.root)}: {printable(beton.names[row])} (image {row}): its size and its bytes do not fit; "
            "run cocor-prep convert again"
        )
