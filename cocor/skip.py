"""``--on-nan skip``: a step whose loss or new weights are no numbers leaves no trace, as if it had not been made.

Everything a step changes (weights, moments, moving averages, queue, BatchNorm's running statistics) is copied before
and put back after a step that went wrong. Choosing between old and new happens on the device, without waiting for it.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from cocor.distributed import mean_over_ranks
from cocor.execution import Step
from cocor.step import Metrics, TrainingStep
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
            room = self._before.get(name)
            self._before[name] = tensor.clone() if room is None else room.copy_(tensor)
        with torch.enable_grad():
            metrics = self._execute(batch, labelled, number)
        fine = self._finite(metrics["loss"])
        for name, tensor in self._state():
            # An optimiser makes its moments in its first step; without a gradient they are 0.
            old = self._before.get(name, torch.zeros_like(tensor))
            tensor.copy_(torch.where(fine, tensor, old))
        return metrics | {"skipped": (~fine).float()}

    def _state(self) -> Iterator[tuple[str, Tensor]]:
        """What a step may change, by name. Not the step's ``state_dict``, which waits for learning rates."""
        for name, part in self._step.parts().items():
            yield from _tensors(part.state_dict(), name)

    def _finite(self, loss: Tensor) -> Tensor:
        """Whether the loss of all ranks and the weights, which all ranks share, are finite: bool (), on the device."""
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
