"""numba's ``njit`` with the project's settings: the GIL released, compiled code cached, arithmetic left alone.

``fastmath`` stays off because the executors promise Pillow's bits, and ``parallel`` because numba's threading layers
abort on concurrent use and do not survive a fork: callers spread samples over a thread pool instead.

numba's cache notices a change of the file a function is in, not of the files of the functions it calls, and would go on
running old code. So the cache folder is named by a digest of all the sources that use ``jit``.
"""

import hashlib
import os
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
    for parent in [Path(chosen)] if chosen else [beside, Path(tempfile.gettempdir(), f"cocor-{os.getuid()}")]:
        folder = parent / f"numba-{_digest()}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError:
            continue
        # cached code is executed: in a shared temporary folder take none that somebody else has laid there
        if os.access(folder, os.W_OK) and (chosen or parent == beside or parent.stat().st_uid == os.getuid()):
            return str(folder)
    return ""


def _digest() -> str:
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        source = path.read_bytes()
        if b"@jit" in source:
            digest.update(source)
    return digest.hexdigest()[:12]
