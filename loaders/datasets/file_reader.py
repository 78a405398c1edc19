"""Compiled reader of many image files, judged by header and end as they are read.

A reader puts the bytes of a batch's images into one block of memory, next to one another. Threads share the work: each
calls :meth:`read` with a part of the batch, which runs without the interpreter's lock. An image is judged by the very
bytes that its decoder gets, so no change of a file can slip in between.
"""

import os
from typing import Any, Protocol

import numpy as np
from numba import types
from numpy.typing import NDArray

from loaders.datasets.beton import RAW
from loaders.datasets.dataset import ImageDataset
from loaders.datasets.stored import StoredDataset
from loaders.jit import jit

Integers = NDArray[np.int64]
Bytes = NDArray[np.uint8]
Sizes = NDArray[np.int32]

GOOD, CHANGED, DAMAGED = range(3)
"""Verdicts. GOOD: safe to decode. CHANGED: missing, or of another length. DAMAGED: no whole JPEG or PNG of this
size."""

_XMP_ORIENTATION = tuple(b"tiff:Orientation")
_TAIL = 1024  # bytes at a JPEG's end in which the end mark must lie
_TYPE_BYTES = np.array([0, 1, 1, 2, 4, 8, 1, 1, 2, 4, 8, 4, 8])  # of the values of an EXIF tag, by type
_PATH_BYTES = 4097  # the longest path that the system takes, with its zero
_PPM = np.frombuffer(b"P6 00000 00000 255\n", np.uint8)  # what comes before the pixels: width, height, largest value

_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC  # a pipe without a writer is opened, and gives no byte

# The C library's functions by name, so that compiled code that calls them can be cached.
_function: Any = types.ExternalFunction
_open = _function("open", types.int32(types.intp, types.int32))
_readv = _function("readv", types.intp(types.int32, types.intp, types.int32))
_close = _function("close", types.int32(types.int32))


class Reader(Protocol):
    """Reader of images: the bytes of ``index[i]`` go to ``block`` at ``starts[i]``."""

    lengths: Integers
    """The bytes that each image of the data set takes in a block."""

    def read(self, index: Integers, starts: Integers, block: Bytes, verdicts: Bytes) -> None:
        """Read images ``index`` (N,) into ``block``, and set their ``verdicts`` (N,)."""
        ...


class FileReader:
    """Reader of a folder's files, which must still have their ``file_sizes``."""

    def __init__(self, dataset: ImageDataset) -> None:
        assert dataset.file_sizes is not None
        self.lengths, self._sizes = dataset.file_sizes, dataset.sizes
        self._root = np.frombuffer(os.fsencode(dataset.root.absolute()) + b"/", np.uint8)
        names = [os.fsencode(name) for name in dataset.names]
        self._names = np.frombuffer(b"".join(names), np.uint8)
        self._ends = np.cumsum([len(name) for name in names], dtype=np.int64)

    def read(self, index: Integers, starts: Integers, block: Bytes, verdicts: Bytes) -> None:
        """See :class:`Reader`."""
        read_files(
            index, self._root, self._names, self._ends, self.lengths, self._sizes, starts, block, verdicts
        )  # fmt: skip


class StoredReader:
    """Copier of images from a ``.beton`` file; raw pixels become PPM files."""

    # Checksums are compared at the first read of an image.

    def __init__(self, dataset: StoredDataset) -> None:
        beton, rows = dataset.file.beton, dataset.rows
        self._file, self._rows, self._sizes = dataset.file, rows, dataset.sizes
        self._data = np.frombuffer(beton.data, np.uint8)
        self._places = beton.table["data_ptr"][rows].astype(np.int64)
        self._raw = beton.table["mode"][rows] == RAW
        self._stored = beton.sizes_in_bytes[rows]
        self.lengths = self._stored + len(_PPM) * self._raw

    def read(self, index: Integers, starts: Integers, block: Bytes, verdicts: Bytes) -> None:
        """See :class:`Reader`."""
        copy_stored(
            index, self._data, self._places, self._stored, self._raw, self._sizes, starts, block, verdicts
        )  # fmt: skip
        damaged = self._file.damage(self._rows[index])
        if damaged:
            verdicts[np.isin(self._rows[index], list(damaged))] = DAMAGED


def open_reader(dataset: ImageDataset) -> Reader:
    """The reader of a data set's images."""
    return StoredReader(dataset) if isinstance(dataset, StoredDataset) else FileReader(dataset)


@jit
def read_files(
    index: Integers,
    root: Bytes,
    names: Bytes,
    ends: Integers,
    lengths: Integers,
    sizes: Sizes,
    starts: Integers,
    block: Bytes,
    verdicts: Bytes,
) -> None:
    """Read the files of images ``index`` (N,) to ``starts`` (N,) in ``block``.

    Sets their ``verdicts`` (N,). An image's path is ``root`` and its part of ``names``, up to ``ends``. ``lengths``
    and ``sizes`` say what the data set expects of each of its images.
    """
    path = np.empty(_PATH_BYTES, np.uint8)
    path[: len(root)] = root
    for i in range(len(index)):
        image = index[i]
        name = names[ends[image - 1] if image else 0 : ends[image]]
        stop = len(root) + len(name)
        verdicts[i] = CHANGED
        if stop >= len(path):
            continue
        path[len(root) : stop] = name
        path[stop] = 0
        data = block[starts[i] : starts[i] + lengths[image]]
        if _read_file(path, data):
            verdicts[i] = judge(data, sizes[image, 0], sizes[image, 1])


@jit
def _read_file(path: Bytes, data: Bytes) -> bool:
    """Fill ``data`` from the file at ``path``, ended by zero; False unless it has just this length."""
    handle = _open(path.ctypes.data, _FLAGS)
    if handle < 0:
        return False
    # One byte more is asked for: a file that has it is too long. To ask for its length instead would be another round
    # trip on some network storage.
    parts, done = np.empty(5, np.intp), 0  # place and length, twice; room for that byte
    parts[2], parts[3] = parts.ctypes.data + 4 * parts.itemsize, 1
    while done < len(data):
        parts[0], parts[1] = data.ctypes.data + done, len(data) - done
        count = _readv(handle, parts.ctypes.data, 2)
        if count <= 0:
            break
        done += count
    _close(handle)
    return done == len(data)


@jit
def copy_stored(
    index: Integers,
    stored: Bytes,
    places: Integers,
    lengths: Integers,
    raw: NDArray[np.bool_],
    sizes: Sizes,
    starts: Integers,
    block: Bytes,
    verdicts: Bytes,
) -> None:
    """Copy images ``index`` (N,) of ``stored`` to ``starts`` (N,) in ``block``.

    Sets their ``verdicts`` (N,). ``places``, ``lengths``, ``raw`` and ``sizes`` belong to the images of the data set.
    """
    for i in range(len(index)):
        image, at = index[i], starts[i]
        height, width = sizes[image, 0], sizes[image, 1]
        content = stored[places[image] : places[image] + lengths[image]]
        if raw[image]:
            _write_ppm_header(block[at:], height, width)
            at += len(_PPM)
        data = block[at : at + len(content)]
        data[:] = content
        verdicts[i] = GOOD if raw[image] else judge(data, height, width)


@jit
def _write_ppm_header(out: Bytes, height: int, width: int) -> None:
    out[: len(_PPM)] = _PPM
    for digit in range(5):
        out[7 - digit] += width // 10**digit % 10
        out[13 - digit] += height // 10**digit % 10


@jit
def judge(data: Bytes, height: int, width: int) -> int:
    """Judge ``data``: GOOD for a whole, upright JPEG or PNG of this size, else DAMAGED.

    GOOD means that every decoder takes it for that.
    """
    return GOOD if jpeg_orientation(data, height, width) or _is_png(data, height, width) else DAMAGED


@jit
def jpeg_orientation(data: Bytes, height: int, width: int) -> int:
    """The orientation 1 to 8 of a whole JPEG whose upright size this is; 0 where decoders may differ.

    It has 8 bits and 1 or 3 channels, is baseline or progressive, and nothing lies between the header's segments.
    """
    count = len(data)
    if count < 4 or data[0] != 0xFF or data[1] != 0xD8:
        return 0
    at, found_height, found_width, orientation, exif_segments = 2, 0, 0, 1, 0
    while True:
        if at + 4 > count or data[at] != 0xFF:
            return 0
        marker = data[at + 1]
        if marker == 0xFF:  # padding
            at += 1
            continue
        length, inside = _big(data, at + 2, 2), at + 4
        if marker <= 0x01 or 0xD0 <= marker <= 0xD9 or length < 2 or at + 2 + length > count:
            return 0
        if marker == 0xDA:  # the pixels begin
            break
        if 0xC0 <= marker <= 0xCF and marker != 0xC4 and marker != 0xC8 and marker != 0xCC:  # a frame
            if marker > 0xC2 or found_height or length < 8 or data[inside] != 8:
                return 0
            channels = data[inside + 5]
            if (channels != 1 and channels != 3) or length != 8 + 3 * channels:
                return 0
            found_height, found_width = _big(data, inside + 1, 2), _big(data, inside + 3, 2)
        elif marker == 0xE1 and length >= 8 and _is_text(data, inside, (69, 120, 105, 102, 0)):  # Exif
            exif_segments += 1
            orientation = _orientation(data[inside + 6 : at + 2 + length])
        elif marker == 0xE1 and _xmp_turns(data[inside : at + 2 + length]):
            return 0
        at += 2 + length
    if exif_segments > 1 or orientation == 0:
        return 0
    if orientation >= 5:
        found_height, found_width = found_width, found_height
    if found_height != height or found_width != width:
        return 0
    for end in range(max(at, count - _TAIL), count - 1):
        if data[end] == 0xFF and data[end + 1] == 0xD9:
            return orientation
    return 0


@jit
def _xmp_turns(segment: Bytes) -> bool:
    """Whether XMP data states an orientation that Pillow turns by: tiff:Orientation="2" or above, or in a tag."""
    for at in range(len(segment) - 17):
        if segment[at] == ord("t") and _is_text(segment, at, _XMP_ORIENTATION):
            value = at + 17 if segment[at + 16] == ord(">") else at + 18
            if value >= len(segment) or segment[value] != ord("1"):
                return True
    return False


@jit
def _is_png(data: Bytes, height: int, width: int) -> bool:
    """A PNG of 8 bits, grey or RGB, without transparency or orientation, whose chunks lead to its end."""
    count = len(data)
    if count < 33 or not _is_text(data, 0, (137, 80, 78, 71, 13, 10, 26, 10)):
        return False
    if _big(data, 8, 4) != 13 or not _is_text(data, 12, (73, 72, 68, 82)):  # IHDR
        return False
    if _big(data, 16, 4) != width or _big(data, 20, 4) != height or data[24] != 8 or (data[25] != 0 and data[25] != 2):
        return False
    at, pixels = 33, False
    while at + 12 <= count:
        length, inside = _big(data, at, 4), at + 8
        if inside + length + 4 > count or _is_text(data, at + 4, (116, 82, 78, 83)):  # tRNS
            return False
        if _is_text(data, at + 4, (101, 88, 73, 102)) and _orientation(data[inside : inside + length]) != 1:  # eXIf
            return False
        if _is_text(data, at + 4, (73, 69, 78, 68)):  # IEND
            return pixels
        pixels = pixels or _is_text(data, at + 4, (73, 68, 65, 84))  # IDAT
        at = inside + length + 4
    return False


@jit
def _orientation(exif: Bytes) -> int:
    """The orientation 1 to 8 that EXIF data states, 1 if none; 0 where decoders may differ on it."""
    count, found = len(exif), 0
    if count < 8:
        return 0
    little = exif[0] == ord("I")
    if exif[0] != exif[1] or not (little or exif[0] == ord("M")) or _number(exif, 2, 2, little) != 42:
        return 0
    start = _number(exif, 4, 4, little)
    if start < 8 or start + 2 > count:
        return 0
    for entry in range(_number(exif, start, 2, little)):
        place = start + 2 + 12 * entry
        if place + 12 > count:
            return 0
        kind, number = _number(exif, place + 2, 2, little), _number(exif, place + 4, 4, little)
        length = number * _TYPE_BYTES[kind] if kind < len(_TYPE_BYTES) else 0
        if length == 0 or (length > 4 and _number(exif, place + 8, 4, little) + length > count):
            return 0  # DALI gives up at such a tag
        if _number(exif, place, 2, little) == 0x0112:
            value = _number(exif, place + 8, 2, little)
            if found or kind != 3 or number != 1 or not 1 <= value <= 8:
                return 0
            found = value
    return found or 1


@jit
def _number(data: Bytes, at: int, count: int, little: bool) -> int:
    value = 0
    for i in range(count):
        value = value * 256 + int(data[at + (count - 1 - i if little else i)])
    return value


@jit
def _big(data: Bytes, at: int, count: int) -> int:
    return _number(data, at, count, False)


@jit
def _is_text(data: Bytes, at: int, text: tuple[int, ...]) -> bool:
    same = True
    for i in range(len(text)):
        same &= data[at + i] == text[i]
    return same
