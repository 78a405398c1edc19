"""Opening a path that the user calls a file but that may be a pipe, which would block, or an endless device."""

import errno
import os
import stat
from typing import BinaryIO

from loaders.errors import UserError
from loaders.text import printable


def open_regular(path: str | os.PathLike[str], wanted: str) -> BinaryIO:
    """The file at ``path``, opened for reading.

    ``wanted`` says what to give instead, such as "a .beton file". Raises :class:`UserError` naming the path if it is
    missing, unreadable or no regular file; a pipe is never waited for.
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
    """``opener`` of :func:`open` that opens a file as usual, and a pipe without waiting for somebody to write to it."""
    return os.open(path, flags | os.O_NONBLOCK)


def _irregular(path: str | os.PathLike[str], wanted: str) -> UserError:
    return UserError(f"{printable(path)}: a pipe, socket or device, not a regular file; give {wanted}")
