"""numba's ``njit`` with the project's settings: the GIL released, compiled code cached, arithmetic left alone.

``fastmath`` stays off because the executors promise Pillow's bits, and ``parallel`` because numba's threading layers
abort on concurrent use and do not survive a fork: callers spread samples over a thread pool instead.
"""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import numba

Function = TypeVar("Function", bound=Callable[..., Any])


def jit(function: Function) -> Function:
    """Compile ``function`` on first call. Read-only installations cache under the temporary folder instead."""
    try:
        return cast(Function, numba.njit(nogil=True, cache=True)(function))
    except RuntimeError:  # numba found no writable cache folder (read-only site-packages, no HOME)
        numba.config.CACHE_DIR = str(Path(tempfile.gettempdir(), f"cocor-numba-{os.getuid()}"))  # type: ignore[attr-defined]
        return cast(Function, numba.njit(nogil=True, cache=True)(function))
