"""A data set inside a ``.beton`` file: the same fields as a folder of images, and the bytes of each image.

Files that cocor-prep wrote carry a checksum of every image, which is compared when the image is first read, so damage
is named instead of shown. Files of other writers have none; there a decoder must notice.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from io import BytesIO
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image

from loaders.datasets.beton import JPEG, RAW, Beton, open_beton
from loaders.datasets.dataset import ImageDataset, number_classes
from loaders.datasets.decode import MAX_PIXELS, ImageFault, decode_file, describe
from loaders.datasets.jpeg import stated_size
from loaders.datasets.labels import read_labels
from loaders.errors import UnusableImage, UserError
from loaders.text import printable


class StoredFile:
    """An open ``.beton`` whose images are compared with their checksums when first read. ``row`` is a place in it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.beton: Beton = open_beton(path)
        self._unchecked = np.full(len(self.beton), self.beton.record is not None)
        _refuse_impossible(self.beton)

    def damage(self, rows: npt.NDArray[np.int64]) -> dict[int, UnusableImage]:
        """By row, what is wrong with those of ``rows`` whose bytes are not those that were written."""
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
        """The stored bytes: a JPEG file, or height x width x 3 values in raw mode. Raises if they are damaged."""
        for fault in self.damage(np.array([row])).values():
            raise fault
        return self.beton.read(row)

    def is_raw(self, row: int) -> bool:
        return bool(self.beton.table["mode"][row] == RAW)

    def decode(self, row: int) -> Image.Image:
        """The image, mode RGB, as :mod:`loaders.datasets.decode` gives it. Raises :class:`UnusableImage` naming it."""
        size: tuple[int, int] = tuple(self.beton.sizes[row, ::-1].tolist())
        data = self.read(row)
        if self.is_raw(row):
            return Image.frombytes("RGB", size, data)
        try:
            image = decode_file(BytesIO(data))
        except ImageFault as fault:
            raise self.damaged(row, describe(fault)) from fault
        if image.size != size:
            raise self.damaged(row, f"{image.width} x {image.height} pixels instead of {size[0]} x {size[1]}")
        return image

    def damaged(self, row: int, why: str) -> UnusableImage:
        """The error for an image that cannot be decoded."""
        return UnusableImage(
            f"{printable(self.path)}: {printable(self.beton.names[row])} (image {row}): {why}; "
            "run cocor-prep convert again"
        )


@lru_cache(maxsize=8)
def _opened(path: Path, identity: tuple[int, int, int]) -> StoredFile:
    return StoredFile(path)


def open_file(path: str | os.PathLike[str]) -> StoredFile:
    """The file at ``path``; opened once in a process, unless it has changed since."""
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
    """N images of a ``.beton`` file; ``rows`` int64 (N,) are their places in it. ``root`` is the file."""

    file: StoredFile = field(kw_only=True)
    rows: npt.NDArray[np.int64] = field(kw_only=True)

    def subset(self, indices: Sequence[int] | npt.NDArray[np.integer]) -> "StoredDataset":
        chosen = super().subset(indices)
        assert isinstance(chosen, StoredDataset)
        return replace(chosen, rows=self.rows[np.asarray(indices, np.int64)])

    def image(self, index: int) -> StoredImage:
        return StoredImage(self.file.path, int(self.rows[index]))

    def encoded(self, index: int) -> npt.NDArray[np.uint8]:
        """An image file that holds image ``index``: the stored JPEG, not copied, or a PPM file of raw pixels.

        Raises :class:`UnusableImage` if the stored bytes are damaged, or state another size than the file's table.
        """
        row = int(self.rows[index])
        data = self.file.read(row)
        height, width = self.sizes[index].tolist()
        if self.file.is_raw(row):
            return np.frombuffer(b"P6 %d %d 255\n" % (width, height) + data, np.uint8)
        encoded = np.frombuffer(data, np.uint8)
        stated = stated_size(encoded)
        if stated != (height, width):  # a decoder that trusts it could fill all memory
            raise self.file.damaged(row, f"{stated[1]} x {stated[0]} pixels instead of {width} x {height}")
        return encoded


def open_stored(
    path: str | os.PathLike[str], labels: str | os.PathLike[str] | None = None, *, classes: Sequence[str] | None = None
) -> StoredDataset:
    """Open a ``.beton`` file of images.

    ``labels`` names a text file that replaces the stored labels (see :func:`loaders.datasets.labels.read_labels`);
    ``classes``
    fixes the classes, such as the training set's for a validation set. Raises :class:`UserError`.
    """
    file = open_file(path)
    beton, count = file.beton, len(file.beton)
    if not count:
        raise UserError(f"{printable(path)}: holds no images; run cocor-prep convert again")
    numbers, known = beton.labels, beton.classes
    if labels is None and classes is not None and beton.record is None:  # labels without names are places
        known = list(classes)
        if int(numbers.max()) >= len(known):
            most = f"is not among the {len(known)} known classes"
            raise UserError(f"{printable(path)}: class {int(numbers.max())} {most}")
    elif labels is not None or classes is not None:
        found = _label_names(file, labels)
        known, numbers = number_classes(Path(path), found, [], classes, allow_empty=True, listed=labels is not None)
    return StoredDataset(
        Path(path),
        beton.names,
        numbers,
        list(known),
        beton.sizes,
        np.ones(count, np.bool_),
        file=file,
        rows=np.arange(count, dtype=np.int64),
    )


def _label_names(file: StoredFile, labels: str | os.PathLike[str] | None) -> list[str | None]:
    beton = file.beton
    if labels is None:
        return [beton.classes[label] if label >= 0 else None for label in beton.labels]
    label_of, unknown = read_labels(Path(labels), beton.names)
    missing = [name for i, name in enumerate(beton.names) if i not in label_of]
    for name, reason in [*unknown, *((name, f"no label in {printable(labels)}") for name in missing)]:
        raise UserError(f"{printable(file.path)}: {printable(name)}: {reason}")
    return [label_of[i] for i in range(len(beton))]


def _refuse_impossible(beton: Beton) -> None:
    """Compiled code trusts the table, so that it must fit the stored bytes."""
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
