"""Files that are whole or absent: written under a temporary name beside the target, synced, then renamed onto it.

A reader, a killed process or a full disk therefore never leaves half a file under the final name, and a file that was
there before stays until its successor is complete.
"""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from loaders.errors import UserError
from loaders.lacking import remedy

TEMPORARY = ".tmp"


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a temporary path to write to; it is renamed to ``path`` if the block succeeds, else removed. Makes folders.

    Raises:
        UserError: an OSError within the block or at the rename, such as a full disk; names the folder. ``path`` is as
            it was.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}{TEMPORARY}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        _sync(temporary)
        temporary.replace(path)
        _sync_rename(path.parent)
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


def _sync_rename(folder: Path) -> None:
    try:
        _sync(folder)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EACCES):  # from some network file systems
            raise


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
