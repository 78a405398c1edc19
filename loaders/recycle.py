"""CPU memory for batches that is used again once nobody refers to it.

A batch on the CPU is hundreds of megabytes. Taken from the system and given back at every step, it costs more time in
the kernel, which must clear it, than half the views cost to compute.
"""

import math
import weakref
from threading import RLock

import numpy as np
import torch
from torch import Tensor

_KEPT = 8  # free blocks: what a loader has in its queues at once


class Recycler:
    """Hands out tensors; the memory of one that is gone, with all its views, may be handed out again."""

    def __init__(self) -> None:
        self._free: list[np.ndarray] = []
        self._lock = RLock()  # a block may come back while another is taken: garbage is collected at any time

    def empty(self, shape: tuple[int, ...], dtype: type[np.generic]) -> Tensor:
        """An uninitialised tensor on the CPU."""
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
