"""Test that no step waits for the device, copies the queue, or passes the network once too often.

Every operation on tensors is looked at, on the CPU, where each step makes the same ones as on a GPU.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.steps import noise, noise_config, noise_step
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from cocor.methods import METHODS
from cocor.monitor.profile import costs

WAITING = {"_local_scalar_dense", "equal", "is_nonzero", "nonzero", "masked_select", "_unique2", "unique_consecutive"}
EVERY_METHOD = pytest.mark.parametrize("method", METHODS)


class Operations(TorchDispatchMode):
    """Calls ``look(name, arguments, results)`` for each operation."""

    def __init__(self, look: Callable[[str, tuple[Any, ...], list[Tensor]], None]) -> None:
        super().__init__()
        self.look = look

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        several = result if isinstance(result, tuple | list) else [result]
        self.look(func._schema.name.split("::")[1], args, [one for one in several if isinstance(one, Tensor)])
        return result


@EVERY_METHOD
@pytest.mark.parametrize(
    "options",
    [{}, {"hypergradient": "taylor"}, {"consistency": "abs"}, {"consistency": "none"}, {"recipe": "released"}],
    ids=str,
)
def test_a_step_reads_nothing_from_the_device(method: str, options: dict) -> None:
    # On the CPU Adam reads its count of steps, which lies on the host.
    still = {"optimiser": "sgd", "mmnn_optimiser": "normalised", "embedding_dim": 24}
    step = noise_step(noise_config(method=method, **still, **options))
    counted: Counter[str] = Counter()
    with Operations(lambda name, args, results: counted.update([name])):
        for number, pair in enumerate(noise(step.config, 2)):
            step.set_rates(number)
            step.compute(*pair)
    assert counted["convolution"] and counted["convolution_backward"]
    assert not WAITING & counted.keys()


def test_the_queue_is_never_copied() -> None:
    step = noise_step(noise_config(queue_size=60_000, embedding_dim=16))
    queue, made = step.method.queue, list[str]()
    assert isinstance(queue, Tensor)
    place = queue.untyped_storage().data_ptr()

    def look(name: str, args: tuple[Any, ...], results: list[Tensor]) -> None:
        large = [one for one in results if one.numel() >= 60_000 * 16 and one.untyped_storage().data_ptr() != place]
        made.extend([name] * len([one for one in large if one.shape[-1] != 60_000]))  # logits: a row an image

    with Operations(look):
        for number, pair in enumerate(noise(step.config, 2)):
            step(*pair, number)
    assert made == [] and step.method.queue is queue


@pytest.mark.parametrize("method", ["moco", "simsiam"])
def test_exact_hypergradient_costs_no_pass(method: str) -> None:
    """In units of the cost model: forward passes, and backward passes that cost two each."""
    step = noise_step(noise_config(method=method))
    layers = sum(isinstance(module, torch.nn.Conv2d) for module in step.method.backbone.modules())
    counted: Counter[str] = Counter()
    with Operations(lambda name, args, results: counted.update([name])):
        step(*next(noise(step.config, 1)), 0)
    model = costs(step.config, ranks=1)
    expected = model["contrastive"] + model["original"] + model["composites"] + 3  # labels, whatever their number
    assert (counted["convolution"] + 2 * counted["convolution_backward"]) / layers == expected


@EVERY_METHOD
def test_all_passes_run_in_the_asked_precision(method: str) -> None:
    config = noise_config(method=method, precision="bf16", embedding_dim=24)
    step, seen = noise_step(config, precision=torch.bfloat16), set[torch.dtype]()

    def look(name: str, args: tuple[Any, ...], results: list[Tensor]) -> None:
        if name == "convolution":
            seen.add(args[0].dtype)

    with Operations(look):
        step(*next(noise(config, 1)), 0)
    assert seen == {torch.bfloat16}


def test_learning_rates_on_the_device() -> None:
    step = noise_step(noise_config())
    step.rates_to_device()
    groups = [group for part in step.parts().values() if isinstance(part, Optimizer) for group in part.param_groups]
    rates, values = [group["lr"] for group in groups], []
    assert len(rates) == 3 and all(isinstance(rate, Tensor) for rate in rates)
    for number in (0, 20):
        step.set_rates(number)
        assert all(group["lr"] is rate for group, rate in zip(groups, rates, strict=True))
        values.append([float(rate) for rate in rates])
    assert all(0 < late < early for early, late in zip(*values, strict=True))
    state = step.state_dict()
    saved = [state[name]["param_groups"][0]["lr"] for name in state if name.endswith("optimiser")]
    assert saved == values[1] and all(isinstance(rate, float) for rate in saved)
