"""CPU executor: view programs by numba, spread over a pool of threads.

A thread takes a few samples at a time. Each crop is packed into pixel words once and serves all views that start from
it; each view is run (``loaders.kernels.program``) and written through one table per channel, in which the pending
per-channel operations and the normalisation are already composed. The functions release the GIL.
"""

import queue
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from loaders.jit import jit
from loaders.kernels.lower import PARAMETERS, normalisation_table
from loaders.kernels.pointwise import flip, pack
from loaders.kernels.program import Scratch, run, scratch
from loaders.kernels.warp import write, write_warped
from loaders.views.plan import ViewLayout

_SAMPLES_AT_A_TIME = 4
_STARTING = threading.Lock()


class CpuExecutor:
    """CPU executor; ``mean`` and ``std`` are per channel, of values in [0, 1]."""

    def __init__(
        self, layout: ViewLayout, size: int, mean: Sequence[float], std: Sequence[float], threads: int = 1
    ) -> None:
        self.size = size
        self.crop_of_view = np.array(layout.crop_of_view, np.int64)
        self.normalise = normalisation_table(mean, std)
        self.threads = max(1, threads)
        self._pool: ThreadPoolExecutor | None = None
        self._scratches: queue.SimpleQueue[Scratch] | None = None

    def __call__(self, crops: Any, flips: Any, codes: Any, params: Any, out: Any = None) -> Any:
        """Make normalised views, float32 (T, B, S, S, 3), into ``out`` if given.

        Takes arrays or CPU tensors; see :class:`loaders.kernels.Executor`. View t of the layout is ``out[t]``.
        """
        crops, flips, codes, params = (np.ascontiguousarray(given) for given in (crops, flips, codes, params))
        batch, views = len(crops), len(self.crop_of_view)
        if out is None:
            out = np.empty((views, batch, self.size, self.size, 3), np.float32)
        target = out.numpy() if isinstance(out, torch.Tensor) else out
        self._check(crops, flips, codes, params, target)
        scratches = self._start()

        def work(first: int) -> None:
            memory = scratches.get()
            try:
                last = min(first + _SAMPLES_AT_A_TIME, batch)
                _run_samples(
                    first, last, crops, flips, codes, params, self.crop_of_view, self.normalise, memory, target
                )
            finally:
                scratches.put(memory)

        starts = range(0, batch, _SAMPLES_AT_A_TIME)
        if self._pool is None:
            for first in starts:
                work(first)
        else:
            list(self._pool.map(work, starts))
        return out

    def close(self) -> None:
        """End the threads; a later call starts new ones."""
        if self._pool is not None:
            self._pool.shutdown()
        self._pool = self._scratches = None

    def _start(self) -> "queue.SimpleQueue[Scratch]":
        """Start threads on first use: an executor may be made before a fork, and pickled."""
        with _STARTING:
            if self._scratches is None:
                self._scratches = queue.SimpleQueue()
                for _ in range(self.threads):
                    self._scratches.put(scratch(self.size))
                if self.threads > 1:
                    self._pool = ThreadPoolExecutor(self.threads, "views")
            return self._scratches

    def _check(
        self, crops: NDArray[Any], flips: NDArray[Any], codes: NDArray[Any], params: NDArray[Any], out: NDArray[Any]
    ) -> None:
        """Check shapes and types, which the compiled code trusts."""
        batch, count, size, views = len(crops), int(self.crop_of_view.max()) + 1, self.size, len(self.crop_of_view)
        length = codes.shape[-1]
        wanted = {
            "crops": (crops, (batch, count, size, size, 3), np.uint8),
            "flips": (flips, (batch, count), np.uint8),
            "codes": (codes, (batch, views, length), np.uint8),
            "params": (params, (batch, views, length, PARAMETERS), np.int32),
            "out": (out, (views, batch, size, size, 3), np.float32),
        }
        for name, (array, shape, dtype) in wanted.items():
            if array.shape != shape or array.dtype != dtype:
                raise ValueError(f"{name} is {array.dtype} {array.shape}, expected {np.dtype(dtype)} {shape}")
        if not out.flags.c_contiguous:
            raise ValueError("out must be contiguous")


@jit
def _run_samples(
    first: int,
    last: int,
    crops: NDArray[np.uint8],
    flips: NDArray[np.uint8],
    codes: NDArray[np.uint8],
    params: NDArray[np.int32],
    crop_of_view: NDArray[np.int64],
    lookup: NDArray[np.float32],
    s: Scratch,
    out: NDArray[np.float32],
) -> None:
    size = crops.shape[2]
    for b in range(first, last):
        packed = -1
        for t in range(crop_of_view.size):
            crop = crop_of_view[t]
            if crop != packed:
                if flips[b, crop]:
                    pack(crops[b, crop], s.pixels[1])
                    flip(s.pixels[1], size, s.pixels[0])
                else:
                    pack(crops[b, crop], s.pixels[0])
                packed = crop
            at, warped = run(codes[b, t], params[b, t], size, s)
            _finish(s, at, warped, size, lookup, out[t, b])


@jit
def _finish(
    s: Scratch, at: int, warped: bool, size: int, lookup: NDArray[np.float32], out: NDArray[np.float32]
) -> None:
    """Write a view: one look-up per value for all that is pending, normalised."""
    composed = np.empty_like(lookup)
    for c in range(3):
        for v in range(256):
            composed[c, v] = lookup[c, s.table[c, v]]
    if warped:
        fill = np.empty(3, lookup.dtype)
        for c in range(3):
            fill[c] = lookup[c, s.fill[c]]
        write_warped(s.pixels[at], size, s.warp, composed, fill, out)
    else:
        write(s.pixels[at], composed, out)
