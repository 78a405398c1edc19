"""Import of FFCV, and patches of what it does to the process it is imported into.

FFCV 1.0.2 is the last release. Importing it fixes multiprocessing's start method and sets the thread count of torch
and numba to 1; its loader sets them again at every epoch, from a background thread, and makes numba's one type of byte
arrays read-only: functions compiled for it before are not found again, and their next compilation is a ``KeyError``.
All of it is undone or switched off here; ``tests/loaders/test_ffcv_loader.py`` fails when a newer FFCV no longer
needs it.
"""

import importlib
import multiprocessing
import sys
import warnings
from functools import cache
from typing import Any

import numba
import numpy as np
import torch
from numba import types

from loaders.errors import UserError

INSTALL = (
    "apt-get install -y --no-install-recommends g++ pkg-config libgl1 libopencv-dev libturbojpeg0-dev "
    "&& pip install ffcv==1.0.2"
)
_READ_ONLY_BYTES = types.Array(types.uint8, 1, "C", readonly=True)
_MAPPED_FILE = types.Tuple([_READ_ONLY_BYTES, types.uint64[::1], types.uint64[::1]])  # content, addresses, sizes
TURBOJPEG = ("tjInitDecompress", "tjDestroy", "tjDecompress2")


def load_ffcv() -> Any:
    """Import ``ffcv`` and undo its side effects. UserError with what to install."""
    try:
        return _load()
    except (ImportError, OSError, AttributeError) as fault:
        raise UserError(
            f"--loader ffcv needs FFCV and its libraries; missing: {_missing(fault)}. On Debian or Ubuntu: {INSTALL}"
        ) from fault


@cache
def _load() -> Any:
    start_method, torch_threads = multiprocessing.get_start_method(allow_none=True), torch.get_num_threads()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ffcv = importlib.import_module("ffcv")
        library = importlib.import_module("ffcv.libffcv").lib
        for name in TURBOJPEG:
            getattr(library, name)  # from libturbojpeg, which FFCV's library is linked to
        _tame()
    finally:
        if "ffcv.pipeline.compiler" in sys.modules:
            numba.set_num_threads(numba.config.NUMBA_NUM_THREADS)  # type: ignore[attr-defined]
        torch.set_num_threads(torch_threads)
        multiprocessing.set_start_method(start_method, force=True)
    return ffcv


def _tame() -> None:
    """Keep FFCV from setting thread counts, changing numba's types and using CUDA."""
    compiler: Any = importlib.import_module("ffcv.pipeline.compiler").Compiler
    iterators: Any = importlib.import_module("ffcv.loader.epoch_iterator")

    def set_num_threads(cls: Any, n: int) -> None:
        cls.num_threads = max(1, n)  # FFCV compiles parallel code where this is above 1

    compiler.set_num_threads = classmethod(set_num_threads)
    iterators.IS_CUDA = False
    manager: Any = importlib.import_module("ffcv.memory_managers").OSCacheManager
    manager.state_type = property(lambda self: _MAPPED_FILE)
    manager.compile_reader = lambda self: compiler.compile(bytes_at, _READ_ONLY_BYTES(types.uint64, _MAPPED_FILE))


def bytes_at(address, file):  # type: ignore[no-untyped-def]
    """Return the bytes stored at an address of the mapped ``file``. FFCV compiles it."""
    content, addresses, sizes = file
    return content[address : address + sizes[np.searchsorted(addresses, address)]]


def _missing(fault: Exception) -> str:
    """Name the package, library or symbol that an import did not find."""
    if isinstance(fault, ModuleNotFoundError) and fault.name:
        return f"the Python package {fault.name}"
    return str(fault).splitlines()[0]
