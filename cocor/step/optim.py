"""Optimisers: SGD and, for the encoder, LARS where a method's authors use it.

A learning rate is a number or a tensor on the device. :func:`set_rate` writes the tensor without waiting, and a CUDA
graph of the step reads it at each replay.

LARS (You et al. 2017; timm's) scales the step of every weight tensor: its gradient plus weight decay is multiplied by
``0.001 |w| / (|gradient| + decay |w|)``. With ``--no-decay-biases``, as in BYOL, biases and normalisation parameters
get neither that factor nor weight decay.
"""

from collections.abc import Iterable
from typing import Any

import torch
from timm.optim.lars import Lars
from torch import Tensor
from torch.optim import Optimizer

from cocor.config.options import Config
from cocor.methods.base import Method


def build_optimiser(config: Config, method: Method) -> Optimizer:
    """The encoder's optimiser, of ``method``'s parameter groups. The caller is to respect their ``fixed_lr``."""
    groups: list[dict[str, Any]] = [
        {**group, "params": [p for p in group["params"] if p.requires_grad]}  # timm freezes some
        for group in method.parameter_groups(config.weight_decay)
    ]
    if not config.decay_biases:
        groups = [part for group in groups for part in _split(group)]
    if config.optimiser == "lars":
        return Lars(groups, lr=config.lr, momentum=config.momentum, always_adapt=True)
    return sgd(groups, config.lr, config.momentum)


def sgd(parameters: Iterable[Any], lr: float, momentum: float, weight_decay: float = 0.0) -> torch.optim.SGD:
    """SGD of parameters or parameter groups; fused into one kernel on a GPU."""
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
    """Hold the learning rates in tensors on the parameters' device. ``load_state_dict`` makes them numbers again."""
    for group in optimiser.param_groups:
        if not isinstance(group["lr"], Tensor):
            group["lr"] = torch.tensor(group["lr"], dtype=torch.float32, device=group["params"][0].device)


def state_of(optimiser: Optimizer) -> dict[str, Any]:
    """The optimiser's ``state_dict``, with learning rates as numbers even if they are held in tensors."""
    state = optimiser.state_dict()
    groups = [{**group, "lr": float(group["lr"])} for group in state["param_groups"]]
    return {**state, "param_groups": groups}


def _split(group: dict[str, Any]) -> list[dict[str, Any]]:
    """``group`` in two: its weights; its biases and normalisation parameters, without weight decay and LARS' factor."""
    weights = [p for p in group["params"] if p.ndim > 1]
    others = [p for p in group["params"] if p.ndim <= 1]
    parts = [{**group, "params": weights}, {**group, "params": others, "weight_decay": 0.0, "always_adapt": False}]
    return [part for part in parts if part["params"]]


@torch.no_grad()
def trust_ratios(optimiser: Optimizer) -> list[Tensor] | None:
    """LARS' factor on each parameter's gradient in the coming step, besides the learning rate: tensors () in the order
    of the optimiser's parameters; None for SGD, where it is 1.

    Call it with the gradients in place, before the step. The hyper-gradient needs it, as it is part of the derivative
    of the step.
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
