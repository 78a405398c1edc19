"""Decisions that all ranks must make alike in every step: has a signal come, is a checkpoint due?"""

from collections import deque

import torch
import torch.distributed as dist
from torch import Tensor

from cocor.distributed.collectives import ranks

_UNDER_WAY = 4  # steps that the host may run ahead of the GPU


class Votes:
    """The maximum over ranks of small non-negative integers, in every step and without making the host wait.

    Every rank calls this in the same steps. On the CPU a call returns the maxima of what was just cast. On several GPUs
    the host would have to wait for them, so a call returns those of ``_UNDER_WAY`` calls earlier, and zeros before.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._late = _UNDER_WAY if device.type == "cuda" and ranks() > 1 else 0
        self._under_way: deque[tuple[Tensor, torch.cuda.Event]] = deque()

    def __call__(self, *numbers: int) -> tuple[int, ...]:
        """Cast ``numbers``, as many in each call; returns the maximum of each over all ranks, see the class."""
        if not self._late:
            return self.now(*numbers)
        cast = torch.tensor(numbers, dtype=torch.float32, device="cpu").pin_memory()
        votes = cast.to(self._device, non_blocking=True)
        dist.all_reduce(votes, dist.ReduceOp.MAX)
        result, done = torch.empty(len(numbers), device="cpu", pin_memory=True), torch.cuda.Event()
        result.copy_(votes, non_blocking=True)
        done.record()
        self._under_way.append((result, done))
        if len(self._under_way) <= self._late:
            return (0,) * len(numbers)
        result, done = self._under_way.popleft()
        done.synchronize()
        return tuple(int(number) for number in result.tolist())

    def now(self, *numbers: int) -> tuple[int, ...]:
        """The maxima of ``numbers`` themselves, which may be negative; waits for them, and drops what is under way."""
        self.forget()
        if ranks() == 1:
            return numbers
        votes = torch.tensor(numbers, dtype=torch.float32, device=self._device)
        dist.all_reduce(votes, dist.ReduceOp.MAX)
        return tuple(int(number) for number in votes.tolist())

    def forget(self) -> None:
        """Drop the votes that are under way; on all ranks at the same step."""
        self._under_way.clear()
