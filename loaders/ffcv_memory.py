"""What numba is told of the file that FFCV maps into memory, in FFCV's place, which would change one of numba's types.

FFCV marks the type of byte arrays as read-only where it stands, in the one object that all code of the process shares:
functions compiled for it before are then not found again, and their next compilation ends in a ``KeyError``.
"""

from typing import Any

import numpy as np
from numba import types

READ_ONLY_BYTES = types.Array(types.uint8, 1, "C", readonly=True)
MAPPED_FILE = types.Tuple([READ_ONLY_BYTES, types.uint64[::1], types.uint64[::1]])  # content, addresses, sizes


def bytes_at(address, file):  # type: ignore[no-untyped-def]
    """What is stored at an address of the mapped ``file``; to be compiled."""
    content, addresses, sizes = file
    return content[address : address + sizes[np.searchsorted(addresses, address)]]


def describe_memory(manager: Any, compiler: Any) -> None:
    """Give FFCV's memory ``manager`` (a class) these types; ``compiler`` is FFCV's."""
    manager.state_type = property(lambda self: MAPPED_FILE)
    manager.compile_reader = lambda self: compiler.compile(bytes_at, READ_ONLY_BYTES(types.uint64, MAPPED_FILE))
