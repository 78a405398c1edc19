"""FFCV's import: what to install where it fails, and what FFCV must not do to the process it is imported into.

FFCV 1.0.2 is the last release. Importing it fixes multiprocessing's start method and sets the thread count of torch
and numba to 1; its loader sets them again at every epoch, from a background thread, and makes numba's one type of byte
arrays read-only, under which functions compiled before are not found again. All of it is undone or switched off here,
from outside; ``tests/test_ffcv_loader.py`` fails when a newer FFCV no longer needs it.
"""

import importlib
import multiprocessing
import sys
import warnings
from functools import cache
from typing import Any

from loaders.errors import UserError

INSTALL = (
    "apt-get install -y --no-install-recommends g++ pkg-config libgl1 libopencv-dev libturbojpeg0-dev "
    "&& pip install ffcv==1.0.2"
)
TURBOJPEG = ("tjInitDecompress", "tjDestroy", "tjDecompressHeader3", "tjDecompress2")


def load_ffcv() -> Any:
    """The package ``ffcv``, its side effects undone. UserError naming what is missing and how to install it."""
    try:
        return _load()
    except (ImportError, OSError, AttributeError) as fault:
        raise UserError(
            f"--loader ffcv needs FFCV and its libraries; missing: {_missing(fault)}. On Debian or Ubuntu: {INSTALL}"
        ) from fault


@cache
def _load() -> Any:
    import numba
    import torch

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
    """Keep FFCV from setting thread counts, changing numba's types and using CUDA, none of which is needed here."""
    compiler: Any = importlib.import_module("ffcv.pipeline.compiler").Compiler
    iterators: Any = importlib.import_module("ffcv.loader.epoch_iterator")

    def set_num_threads(cls: Any, n: int) -> None:
        cls.num_threads = max(1, n)  # FFCV compiles parallel code where this is above 1

    compiler.set_num_threads = classmethod(set_num_threads)
    iterators.IS_CUDA = False
    memory: Any = importlib.import_module("ffcv.memory_managers")
    importlib.import_module("loaders.ffcv.memory").describe_memory(memory.OSCacheManager, compiler)


def _missing(fault: Exception) -> str:
    """The name of the package, library or symbol that an import did not find."""
    if isinstance(fault, ModuleNotFoundError) and fault.name:
        return f"the Python package {fault.name}"
    return str(fault).splitlines()[0]
