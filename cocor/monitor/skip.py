"""``--on-nan skip``: a step whose loss or new weights are not finite is undone, as if it had not been made.

Everything that a step changes (weights, momentum buffers, moving averages, queue, BatchNorm's running statistics) is
copied before a step, and restored if it went wrong. The choice is made on the device, without waiting for it.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from cocor.distributed.collectives import mean_over_ranks
from cocor.step.compile import Step
from cocor.step.step import Metrics, TrainingStep
from loaders.batch import Batch


class SkippingStep:
    """Makes the steps of ``step`` by ``execute`` and undoes those that are not finite; the metric ``skipped`` is 1 for
    these, else 0.

    Costs a copy of the training state: its memory once more, and the time to move it twice a step.
    """

    def __init__(self, step: TrainingStep, execute: Step) -> None:
        self._step, self._execute = step, execute
        self._before: dict[str, Tensor] = {}

    @torch.no_grad()
    def __call__(self, batch: Batch, labelled: Batch | None, number: int) -> Metrics:
        for name, tensor in self._state():
            copy = self._before.get(name)
            self._before[name] = tensor.clone() if copy is None else copy.copy_(tensor)
        with torch.enable_grad():
            metrics = self._execute(batch, labelled, number)
        finite = self._finite(metrics["loss"])
        for name, tensor in self._state():
            # Momentum buffers, which an optimiser makes in its first step, would be 0 without it.
            old = self._before.get(name, torch.zeros_like(tensor))
            tensor.copy_(torch.where(finite, tensor, old))
        return metrics | {"skipped": (~finite).float()}

    def _state(self) -> Iterator[tuple[str, Tensor]]:
        """All tensors that a step may change, by name. (The step's own ``state_dict`` would wait for the device, to
        read learning rates.)"""
        for name, part in self._step.parts().items():
            yield from _tensors(part.state_dict(), name)

    def _finite(self, loss: Tensor) -> Tensor:
        """Whether the losses of all ranks and the weights, which all ranks share, are finite: bool () on the device."""
        norms = torch._foreach_norm(self._step.weights())
        everything = torch.stack([mean_over_ranks(loss.float()), *(norm.float() for norm in norms)])
        return everything.isfinite().all()


def _tensors(state: Any, place: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors in nested dicts and lists, by their path."""
    if isinstance(state, Tensor):
        yield place, state
    elif isinstance(state, Mapping):
        for key, value in state.items():
            yield from _tensors(value, f"{place}/{key}")
    elif isinstance(state, list | tuple):
        for key, value in enumerate(state):
            yield from _tensors(value, f"{place}/{key}")
