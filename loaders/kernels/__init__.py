"""Executors of view programs on CPU and GPU, which give the same bits."""

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from loaders.views.plan import ViewLayout


class Executor(Protocol):
    """Executor: makes all views of a batch from its crops."""

    def __call__(self, crops: Any, flips: Any, codes: Any, params: Any, out: Any = None) -> Any:
        """Make normalised views (T, B, S, S, 3) of ``crops`` (B, C, S, S, 3) uint8.

        ``flips`` (B, C) uint8, ``codes`` (B, T, P) uint8, ``params`` (B, T, P, 8) int32 from
        :func:`loaders.kernels.lower.lower`; all on the executor's device, as is ``out``, into which they are written if
        given. The CPU executor also takes and returns NumPy arrays.
        """
        ...

    def close(self) -> None:
        """End the threads, if there are any; a later call starts new ones."""
        ...


def make_executor(
    device: torch.device,
    dtype: torch.dtype,
    layout: ViewLayout,
    size: int,
    mean: Sequence[float],
    std: Sequence[float],
    threads: int,
) -> Executor:
    """Make the executor for ``device``; ``threads`` matters on the CPU only."""
    if device.type == "cuda":
        from loaders.kernels.cuda import CudaExecutor

        return CudaExecutor(layout, size, mean, std, dtype=dtype, device=device)
    from loaders.kernels.cpu import CpuExecutor

    return CpuExecutor(layout, size, mean, std, threads)
