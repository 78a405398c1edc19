"""Optimisers: SGD, for the encoder also LARS where a method's authors use it.

A learning rate is a number, or a tensor on the device, which :func:`set_rate` writes without waiting: a recorded step
reads it anew each time it is played back.

LARS (You et al. 2017; timm's) gives every weight its own step: the gradient with its decay is scaled by
``0.001 |w| / (|gradient| + decay |w|)``. Biases and the weights of normalisation stay out of both, as in BYOL.
"""

from collections.abc import Iterable
from typing import Any

import torch
from timm.optim.lars import Lars
from torch import Tensor
from torch.optim import Optimizer

from cocor.config import Config
from cocor.methods.base import Method


def build_optimiser(config: Config, method: Method) -> Optimizer:
    """The optimiser of ``method``'s parameter groups, whose ``fixed_lr`` is for the caller to heed."""
    groups: list[dict[str, Any]] = [
        {**group, "params": [p for p in group["params"] if p.requires_grad]}  # timm freezes some
        for group in method.parameter_groups(config.weight_decay)
    ]
    if not config.decay_biases:
        groups = [part for group in groups for part in _apart(group)]
    if config.optimiser == "lars":
        return Lars(groups, lr=config.lr, momentum=config.momentum, always_adapt=True)
    return sgd(groups, config.lr, config.momentum)


def sgd(parameters: Iterable[Any], lr: float, momentum: float, weight_decay: float = 0.0) -> torch.optim.SGD:
    """SGD of parameters or groups of them; on a GPU one kernel for all."""
    parameters = list(parameters)
    first = parameters[0]["params"][0] if isinstance(parameters[0], dict) else parameters[0]
    return torch.optim.SGD(
        parameters, lr=lr, momentum=momentum, weight_decay=weight_decay, fused=first.device.type == "cuda"
    )


def set_rate(group: dict[str, Any], rate: float) -> None:
    """Give ``group`` of an optimiser its learning rate for the coming step."""
    if isinstance(group["lr"], Tensor):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate


def rates_to_device(optimiser: Optimizer) -> None:
    """Hold the learning rates in tensors beside the parameters. What loads a state makes them numbers again."""
    for group in optimiser.param_groups:
        if not isinstance(group["lr"], Tensor):
            group["lr"] = torch.tensor(group["lr"], dtype=torch.float32, device=group["params"][0].device)


def state_of(optimiser: Optimizer) -> dict[str, Any]:
    """The optimiser's ``state_dict``, with learning rates as numbers wherever they are held."""
    state = optimiser.state_dict()
    groups = [{**group, "lr": float(group["lr"])} for group in state["param_groups"]]
    return {**state, "param_groups": groups}


def _apart(group: dict[str, Any]) -> list[dict[str, Any]]:
    """``group`` in two: its weights, and its biases and normalisation, which neither decay nor does LARS scale them."""
    weights = [p for p in group["params"] if p.ndim > 1]
    others = [p for p in group["params"] if p.ndim <= 1]
    parts = [{**group, "params": weights}, {**group, "params": others, "weight_decay": 0.0, "always_adapt": False}]
    return [part for part in parts if part["params"]]


@torch.no_grad()
def trust_ratios(optimiser: Optimizer) -> list[Tensor] | None:
    """What the coming step multiplies each parameter's gradient by, besides the learning rate: scalars in the order of
    the optimiser's parameters; None for SGD, where it is 1.

    Call it with the gradients in place, before the step. It tells the hyper-gradient how far a weight really moves.
    """
    if not isinstance(optimiser, Lars):
        return None
    return [ratio for group in optimiser.param_groups for ratio in _ratios(group)]


def _ratios(group: dict[str, Any]) -> Iterable[Tensor]:
    parameters = group["params"]
    if group["weight_decay"] == 0 and not group["always_adapt"]:
        return [torch.ones((), device=p.device, dtype=p.dtype) for p in parameters]
    weights = torch.stack(torch._foreach_norm(parameters))
    gradients = torch.stack(torch._foreach_norm([p.grad for p in parameters]))
    ratios = group["trust_coeff"] * weights / (gradients + group["weight_decay"] * weights + group["eps"])
    return torch.where((weights > 0) & (gradients > 0), ratios, 1.0).unbind()
