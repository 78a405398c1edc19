"""Buffer pool: CPU memory for batches that is reused once nothing refers to it.

A batch on the CPU is hundreds of megabytes. Allocating it from the system at every step costs more time, spent in the
kernel clearing pages, than computing half of the views.
"""

import math
import weakref
from threading import RLock

import numpy as np
import torch
from torch import Tensor

_KEPT = 8  # free blocks: as many as a loader has in its queues at once


class BufferPool:
    """Allocate tensors from the memory of earlier ones, and their views, now gone."""

    def __init__(self) -> None:
        self._free: list[np.ndarray] = []
        self._lock = RLock()  # a block may come back while another is taken: garbage is collected at any time

    def empty(self, shape: tuple[int, ...], dtype: type[np.generic]) -> Tensor:
        """Allocate an uninitialised tensor on the CPU."""
        count = math.prod(shape) * np.dtype(dtype).itemsize
        block = self._take(count)
        array = block[:count].view(dtype).reshape(shape)
        # torch keeps this very array alive for as long as the tensor or a view of it is.
        weakref.finalize(array, self._give, block).atexit = False
        return torch.from_numpy(array)

    def clear(self) -> None:
        """Give free memory back to the system."""
        with self._lock:
            self._free.clear()

    def _take(self, count: int) -> np.ndarray:
        with self._lock:
            for i, block in enumerate(self._free):
                if count <= block.nbytes <= 2 * count:
                    return self._free.pop(i)
        return np.empty(count, np.uint8)

    def _give(self, block: np.ndarray) -> None:
        with self._lock:
            if len(self._free) < _KEPT:
                self._free.append(block)
