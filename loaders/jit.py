"""numba's ``njit`` with the project's settings: no GIL, cached, strict arithmetic.

``fastmath`` stays off because the executors promise Pillow's bits, and ``parallel`` because numba's threading layers
abort on concurrent use and do not survive a fork: callers spread samples over a thread pool instead.

numba's cache notices a change of the file a function is in, not of the files of the functions it calls or of the
constants that it uses, and would go on running old code. So the cache folder is named by a digest of all the sources
that use ``jit`` and of what they import. A cache that cannot be written or read costs nothing but time.
"""

import hashlib
import os
import re
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
from numba.core.caching import FunctionCache

from loaders.files import private_folder

Function = TypeVar("Function", bound=Callable[..., Any])

_PACKAGE = Path(__file__).parent
_IMPORT = re.compile(rb"^\s*(?:from|import) (loaders[\w.]*)(?: import ([\w, ]+))?", re.MULTILINE)


def jit(function: Function) -> Function:
    """Compile ``function`` on first call, or load it from the cache."""
    compiled: Any = numba.njit(nogil=True)(function)
    config: Any = numba.config
    before, folder = config.CACHE_DIR, _cache_folder()
    if folder:
        config.CACHE_DIR = folder  # read when the cache is made
        with suppress(RuntimeError, OSError):  # no place for it
            compiled._cache = _Cache(function)
        config.CACHE_DIR = before
    return cast(Function, compiled)


class _Cache(FunctionCache):
    """Compile anew on a full disk or a truncated file, instead of failing."""

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        try:
            return super().load_overload(sig, target_context)
        except Exception:  # a damaged pickle can fail in any way
            with suppress(OSError):
                self.flush()
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        with suppress(OSError):
            super().save_overload(sig, data)


@cache
def _cache_folder() -> str:
    """Make the cache: in NUMBA_CACHE_DIR, beside the sources or a temporary one."""
    beside = Path(__file__).parent / "__pycache__"
    chosen = os.environ.get("NUMBA_CACHE_DIR")
    for place in [lambda: Path(chosen)] if chosen else [lambda: beside, private_folder]:
        with suppress(OSError):
            folder = place() / f"numba-{_digest()}"
            folder.mkdir(parents=True, exist_ok=True)
            if os.access(folder, os.W_OK):
                return str(folder)
    return ""


def _digest() -> str:
    """Digest the sources of compiled functions."""
    digest = hashlib.sha256()
    for path in sources():
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def sources() -> list[Path]:
    """List all files with compiled functions, and all that these import from here."""
    texts = {path: path.read_bytes() for path in sorted(_PACKAGE.rglob("*.py"))}
    wanted = [path for path, text in texts.items() if b"@jit" in text]
    chosen = set(wanted)
    while wanted:
        for module, names in _IMPORT.findall(texts[wanted.pop()]):
            place = _PACKAGE.joinpath(*module.decode().split(".")[1:])
            parts = [place / name.strip() for name in names.decode().split(",")]  # modules, or what is in this one
            found = {path.with_suffix(".py") for path in (place, *parts)} & texts.keys() - chosen
            chosen |= found
            wanted += found
    return sorted(chosen)
