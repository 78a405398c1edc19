"""A per-user folder in the temporary one, for caches that have no better place."""

import os
import stat
import tempfile
from pathlib import Path


def private_folder() -> Path:
    """A folder that only this user can write to, made if need be. OSError if there can be none."""
    folder = Path(tempfile.gettempdir(), f"cocor-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()  # a link may lead anywhere
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise PermissionError(f"{folder}: others can write there")
    return folder
