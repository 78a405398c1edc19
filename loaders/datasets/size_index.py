"""Size index of a folder: upright height and width of every image, for crop boxes.

A parallel scan reads the headers once (and the ends, where truncation shows), and so finds most unusable files before
training starts. The result is kept in the user's cache folder, in a file for each data set's path, under a key made of
every file's name, size and modification time: a changed folder is scanned again. A cache that cannot be read or written
is no error.
"""

import hashlib
import os
import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from loaders.datasets.decode import Header, ImageFault, decode_file, describe, read_header
from loaders.datasets.folder import Listing
from loaders.errors import no_fault_of_a_file
from loaders.files import open_regular, user_cache, without_waiting
from loaders.progress import track

CACHE_NAME = ".cocor-index.npz"  # of earlier versions, beside the class folders

_VERSION = b"5"  # of the format and of the rules in loaders.datasets.decode
_CHUNK = 128
_TAIL = 1024
_ENDS = (b"\xff\xd9", b"IEND")
_one_decode = threading.Lock()  # a suspicious file may be a bomb just below the limit: never several at once


@dataclass(frozen=True)
class SizeIndex:
    """Columns of N files, and ``faults`` by place of the unusable ones.

    ``sizes`` int32 (N, 2): upright height and width; ``plain`` bool (N,): see :class:`loaders.datasets.decode.Header`.
    """

    sizes: npt.NDArray[np.int32]
    plain: npt.NDArray[np.bool_]
    faults: dict[int, str]


def size_index(root: Path, listing: Listing, workers: int, quiet: bool = False) -> SizeIndex:
    """Index the files in ``listing``, from the cache if that is up to date."""
    key = _key(listing)
    place, earlier = index_file(root), root / CACHE_NAME
    if (cached := _read(place, key)) is not None:
        return cached
    if (cached := _read(earlier, key)) is not None:
        if _write(place, key, cached):
            with suppress(OSError):
                earlier.unlink()
        return cached
    found = _scan(root, listing.names, workers, quiet)
    headers = [item if isinstance(item, Header) else Header(0, 0, False) for item in found]
    index = SizeIndex(
        np.array([(header.height, header.width) for header in headers], np.int32).reshape(-1, 2),
        np.array([header.plain for header in headers], np.bool_),
        {i: describe(item) for i, item in enumerate(found) if not isinstance(item, Header)},
    )
    if not any(isinstance(item, OSError) for item in found):  # a disk's or a permission's fault may pass
        _write(place, key, index)
    return index


def _scan(root: Path, names: Sequence[str], workers: int, quiet: bool) -> list[Header | Exception]:
    def inspect_chunk(start: int) -> list[Header | Exception]:
        return [inspect(f"{root}/{name}") for name in names[start : start + _CHUNK]]

    found: list[Header | Exception] = []
    with ThreadPoolExecutor(max(1, workers), thread_name_prefix="cocor-scan") as pool:
        chunks = pool.map(inspect_chunk, range(0, len(names), _CHUNK))
        for chunk in chunks if quiet else track(chunks, len(names), "reading image sizes", "images", _CHUNK):
            found.extend(chunk)
    return found


def inspect(path: str) -> Header | ImageFault | OSError:
    """Read the header at ``path``, or say why not. OSError for want of resources."""
    try:
        with open(path, "rb", opener=without_waiting) as file:
            header = read_header(file)
            if header.plain and not _has_end(file):
                with _one_decode:
                    decode_file(file)
            return header
    except (ImageFault, OSError) as fault:
        if no_fault_of_a_file(fault):
            raise
        return fault


def _has_end(file: BinaryIO) -> bool:
    """Look for a JPEG's or PNG's end mark in the last bytes; rewind."""
    file.seek(0, os.SEEK_END)
    file.seek(max(0, file.tell() - _TAIL))
    tail = file.read()
    file.seek(0)
    return any(end in tail for end in _ENDS)


def _key(listing: Listing) -> str:
    digest = hashlib.sha256(_VERSION)
    digest.update(b"\0".join(os.fsencode(name) for name in listing.names))
    digest.update(np.array([listing.sizes, listing.mtimes], np.int64).tobytes())
    return digest.hexdigest()


def index_file(root: Path) -> Path:
    """Name the file that keeps the index of the folder ``root``."""
    return Path(user_cache(), hashlib.sha256(os.fsencode(os.path.realpath(root))).hexdigest()[:16] + ".npz")


def _read(place: Path, key: str) -> SizeIndex | None:
    try:
        with open_regular(place, "no such file") as file, np.load(file, allow_pickle=False) as stored:
            if str(stored["key"]) != key:
                return None
            faults = dict(zip(stored["fault_at"].tolist(), stored["faults"].tolist(), strict=True))
            return SizeIndex(stored["sizes"], stored["plain"], faults)
    except Exception:  # missing, truncated, foreign: numpy and zipfile raise many kinds, and all mean "scan again"
        return None


def _write(place: Path, key: str, index: SizeIndex) -> bool:
    """Write through a temporary file, so that nobody ever sees half of it."""
    temporary = ""
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(prefix=".cocor-", suffix=".tmp", dir=place.parent)
        with os.fdopen(handle, "wb") as file:
            os.fchmod(handle, 0o644)
            fault_at, faults = np.array(list(index.faults), np.int64), np.array(list(index.faults.values()), np.str_)
            np.savez(
                file, key=np.array(key), sizes=index.sizes, plain=index.plain, fault_at=fault_at, faults=faults
            )  # fmt: skip
        Path(temporary).replace(place)
    except OSError:
        if temporary:
            Path(temporary).unlink(missing_ok=True)
        return False
    return True
