"""Files and folders: opened without waiting, written whole or not at all; caches."""

import errno
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from loaders.errors import UserError, remedy
from loaders.text import printable

TEMPORARY = ".tmp"  # the suffix of files that are being written
_TRIED = bytes(4096)  # enough for a full disk to refuse


def open_regular(path: str | os.PathLike[str], wanted: str) -> BinaryIO:
    """Open the regular file at ``path`` for reading, without ever waiting for a pipe.

    UserError if there is none that can be read; ``wanted`` says what to give, such as "a .beton file".
    """
    try:
        file = open(path, "rb", opener=without_waiting)  # noqa: SIM115
    except ValueError:  # a NUL in the name
        raise UserError(f"{printable(path)}: not the name of a file; give {wanted}") from None
    except OSError as fault:
        if fault.errno == errno.ENXIO:  # a socket
            raise _irregular(path, wanted) from fault
        raise UserError(f"{printable(path)}: {fault.strerror}; give {wanted}") from fault
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise _irregular(path, wanted)
    return file


def without_waiting(path: str, flags: int) -> int:
    """Open as :func:`open` does (its ``opener``), but never wait for a pipe's writer."""
    return os.open(path, flags | os.O_NONBLOCK)


def _irregular(path: str | os.PathLike[str], wanted: str) -> UserError:
    return UserError(f"{printable(path)}: a pipe, socket or device, not a regular file; give {wanted}")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Replace ``path`` by what the block writes to a temporary path, or not at all.

    A killed process or a full disk leaves no half file under the final name, and a file that was there stays. An
    OSError within the block or at the rename becomes a UserError that names the folder.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}{TEMPORARY}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        sync(temporary)
        temporary.replace(path)
    except OSError as error:
        advice = remedy(error.errno, "free some space or choose another --output")
        raise UserError(f"cannot write {path.name} in {path.parent}: {error.strerror or error}; {advice}") from error
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write ``text`` to ``path`` as UTF-8, whole or not at all."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def sync(path: Path) -> None:
    """Flush a file to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def check_file(flag: str, path: Path) -> None:
    """Check that ``path`` can be written. UserError, naming ``flag``, if not."""
    if path.is_dir():
        raise UserError(f"{flag} {printable(path)} is a folder; name a file")
    check_folder(flag, path.parent, named=path)


def check_folder(flag: str, folder: Path, named: Path | None = None) -> None:
    """Check that files can be written in ``folder``, or where it would be made.

    UserError, naming ``flag`` and the path (``named``, if that is another), if not.
    """
    subject, choose = f"{flag} {printable(named or folder)}", f"choose another {flag}".rstrip()
    place = folder.absolute()
    try:
        while not place.exists() and place != place.parent:
            place = place.parent
        if not place.is_dir():
            raise UserError(f"{subject}: {printable(place)} is no folder; {choose}")
        with tempfile.TemporaryFile(dir=place) as file:
            file.write(_TRIED)
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        advice = remedy(error.errno, f"free some space or {choose}" if full else choose)
        raise UserError(f"{subject}: {printable(place)} cannot be written: {error.strerror}; {advice}") from None


def private_folder() -> Path:
    """Make a temporary folder that only this user can write to. OSError if impossible."""
    folder = Path(tempfile.gettempdir(), f"cocor-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()  # a link may lead anywhere
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise PermissionError(f"{folder}: others can write there")
    return folder


def user_cache() -> Path:
    """Name the user's cache folder, which need not exist or be writable.

    ``$XDG_CACHE_HOME/cocor``, ``~/.cache/cocor`` or, for a user without a home, one in the temporary folder.
    """
    named = os.environ.get("XDG_CACHE_HOME")
    home = os.path.expanduser("~")  # noqa: PTH111 (a Path's own raises where there is no home)
    if named or home != "~":
        return Path(named or f"{home}/.cache", "cocor")
    try:
        return private_folder() / "cache"
    except OSError:
        return Path(os.devnull, "cocor")  # which cannot be made
