"""Checks, before hours of work, that their output can be written at the end."""

import errno
import tempfile
from pathlib import Path

from loaders.errors import UserError
from loaders.lacking import remedy
from loaders.text import printable

_TRIED = bytes(4096)  # enough for a full disk to refuse


def check_file(flag: str, path: Path) -> None:
    """UserError, naming ``flag``, unless the file ``path`` can be made or replaced. Leaves nothing behind."""
    if path.is_dir():
        raise UserError(f"{flag} {printable(path)} is a folder; name a file")
    check_folder(flag, path.parent, named=path)


def check_folder(flag: str, folder: Path, named: Path | None = None) -> None:
    """UserError, naming ``flag`` (and ``named``, if that is another path), unless files can be written in ``folder``,
    which may have yet to be made. Leaves nothing behind."""
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
