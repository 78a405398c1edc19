"""numba's types for the file that FFCV maps into memory, in place of FFCV's own.

FFCV marks numba's type of byte arrays as read-only by changing the one object that all code of the process shares:
functions compiled for it before are not found again, and their next compilation ends in a ``KeyError``.
"""

from typing import Any

import numpy as np
from numba import types

READ_ONLY_BYTES = types.Array(types.uint8, 1, "C", readonly=True)
MAPPED_FILE = types.Tuple([READ_ONLY_BYTES, types.uint64[::1], types.uint64[::1]])  # content, addresses, sizes


def bytes_at(address, file):  # type: ignore[no-untyped-def]
    """The bytes stored at an address of the mapped ``file``. FFCV compiles it."""
    content, addresses, sizes = file
    return content[address : address + sizes[np.searchsorted(addresses, address)]]


def describe_memory(manager: Any, compiler: Any) -> None:
    """Make FFCV's memory ``manager`` (a class) use these types; ``compiler`` is FFCV's."""
    manager.state_type = property(lambda self: MAPPED_FILE)
    manager.compile_reader = lambda self: compiler.compile(bytes_at, READ_ONLY_BYTES(types.uint64, MAPPED_FILE))
