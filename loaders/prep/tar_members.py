"""The members of a tar, and of the tars inside it, each with the place of its bytes in the outer file.

Python's tarfile takes a cut between two members, or a damaged header, for the end of a tar, and reads a tar inside
another one past its end. Here a tar is read within its bounds and must end as tars do, with two blocks of zeros and
nothing but zeros behind them: a cut download costs an error, never images.
"""

import io
import os
import tarfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import BinaryIO, NamedTuple

from loaders.datasets.decode import describe
from loaders.datasets.folder import is_hidden
from loaders.errors import UserError
from loaders.files import open_regular
from loaders.prep.byte_ranges import Stretch
from loaders.text import printable

_END = 2 * tarfile.BLOCKSIZE
_CHUNK = 1 << 20
_UNREADABLE = (tarfile.TarError, EOFError, ValueError, OverflowError, MemoryError)


class Member(NamedTuple):
    """A visible file: ``fault`` says why it must not be used ("" for nothing)."""

    name: str
    place: Stretch
    fault: str


def list_tar(shard: Path) -> Iterator[Member]:
    """The visible members of ``shard`` in order; a tar within it is opened and names a folder.

    Raises :class:`UserError` naming ``shard``, and the tar within it, if one cannot be read to its end.
    """
    with open_regular(shard, "an uncompressed tar") as file:
        path, size = str(shard.absolute()), file.seek(0, io.SEEK_END)
        for member in _members(file, path, 0, size, printable(shard)):
            if member.fault or not member.name.endswith(".tar"):
                yield member
                continue
            folder, inside = member.name.removesuffix(".tar"), member.place
            where = f"{printable(shard)}: {printable(member.name)} in it"
            count = 0
            for inner in _members(file, path, inside.offset, inside.length, where):
                count += 1
                yield inner._replace(name=f"{folder}/{inner.name}")
            if not count:
                raise UserError(f"{where}: an empty tar; fetch it again")


def _members(file: BinaryIO, path: str, start: int, size: int, where: str) -> Iterator[Member]:
    """The visible members of the tar in ``size`` bytes from ``start`` on. ``where`` names it in errors."""
    window = io.BufferedReader(_Window(file, start, size), tarfile.RECORDSIZE)
    try:
        with tarfile.open(fileobj=window, mode="r:") as tar:
            for member in _forwards(tar):
                parts = member.name.split("/")
                if member.isdir() or any(is_hidden(part) for part in parts if part not in (".", "..")):
                    continue
                place = Stretch(path, start + member.offset_data, member.size)
                yield Member(member.name.removeprefix("./"), place, _fault(member))
            _check_end(window, tar.offset, where)
    except _UNREADABLE as fault:
        raise UserError(
            f"{where}: not a readable, uncompressed tar ({describe(fault)}); fetch or unpack it again"
        ) from fault


def _forwards(tar: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """The members of a tar. A negative size would lead tarfile back to what it has read, again and again."""
    for member in tar:
        if member.size < 0 or tar.offset <= member.offset:
            raise ValueError("a member of negative size")
        tar.members.clear()  # type: ignore[attr-defined]  # it keeps them all, a kilobyte each
        yield member


def _check_end(file: BinaryIO, end: int, where: str) -> None:
    """Raise unless there are two blocks of zeros at ``end``, where tarfile stopped, and only zeros behind them."""
    file.seek(end)
    closing = file.read(_END)
    if any(closing):
        raise UserError(f"{where}: damaged or cut after {end:,} bytes; fetch it again")
    if len(closing) < _END:
        raise UserError(f"{where}: the end of this tar is missing; fetch it again")
    while chunk := file.read(_CHUNK):
        if chunk.count(0) != len(chunk):
            raise UserError(f"{where}: goes on behind its end, like two tars in one file; keep them apart")


def _fault(member: tarfile.TarInfo) -> str:
    path = PurePosixPath(member.name)
    if path.is_absolute() or ".." in path.parts or "\0" in member.name:
        return "would leave the target folder"
    if not member.isreg():
        return "a link or device, not a file"
    if member.issparse():
        return "a sparse file, whose bytes do not lie together"
    return ""


class _Window(io.RawIOBase):
    """``size`` bytes of ``file`` from ``start`` on, as a file of its own."""

    def __init__(self, file: BinaryIO, start: int, size: int) -> None:
        self._file, self._start, self._size, self._at = file, start, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        if at < 0:
            raise ValueError("a place before its beginning")
        self._at = at
        return at

    def readinto(self, buffer) -> int:  # type: ignore[no-untyped-def]
        room = max(0, min(len(buffer), self._size - self._at))
        count = os.preadv(self._file.fileno(), [memoryview(buffer)[:room]], self._start + self._at)
        self._at += count
        return count
