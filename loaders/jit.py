"""numba's ``njit`` with the project's settings: the GIL released, compiled code cached, arithmetic left alone.

``fastmath`` stays off because the executors promise Pillow's bits, and ``parallel`` because numba's threading layers
abort on concurrent use and do not survive a fork: callers spread samples over a thread pool instead.

numba's cache notices a change of the file a function is in, not of the files of the functions it calls, and would go on
running old code. So the cache folder is named by a digest of all the sources that use ``jit``.
"""

import hashlib
import os
import stat
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

import numba

Function = TypeVar("Function", bound=Callable[..., Any])


def jit(function: Function) -> Function:
    """Compile ``function`` on first call, or load it from the cache."""
    config: Any = numba.config
    before, folder = config.CACHE_DIR, _cache_folder()
    config.CACHE_DIR = folder  # read when the function is made
    try:
        return cast(Function, numba.njit(nogil=True, cache=bool(folder))(function))
    finally:
        config.CACHE_DIR = before


@cache
def _cache_folder() -> str:
    """Beside the sources, or in the temporary folder for read-only installations; NUMBA_CACHE_DIR comes first."""
    beside = Path(__file__).parent / "__pycache__"
    chosen = os.environ.get("NUMBA_CACHE_DIR")
    shared = Path(tempfile.gettempdir(), f"cocor-{os.getuid()}")
    for parent in [Path(chosen)] if chosen else [beside, shared]:
        folder = parent / f"numba-{_digest()}"
        try:
            if parent == shared:
                parent.mkdir(mode=0o700, exist_ok=True)
            folder.mkdir(parents=True, exist_ok=True)
            if os.access(folder, os.W_OK) and (parent != shared or _is_ours_alone(parent)):
                return str(folder)
        except OSError:
            continue
    return ""


def _is_ours_alone(folder: Path) -> bool:
    """Whether nobody else can have laid anything in a folder: cached code is executed."""
    status = folder.lstat()  # a link may lead anywhere
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o022


def _digest() -> str:
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        source = path.read_bytes()
        if b"@jit" in source:
            digest.update(source)
    return digest.hexdigest()[:12]
