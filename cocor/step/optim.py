"""Build optimisers (SGD, LARS, AdamW; Adam for the MMNN) and schedules.

A learning rate is a number or a tensor on the device. :func:`set_rate` writes the tensor without waiting, and a CUDA
graph of the step reads it at each replay.

LARS (You et al. 2017; timm's), which BYOL's authors use, scales the step of every weight tensor: its gradient plus
weight decay is multiplied by ``0.001 |w| / (|gradient| + decay |w|)``. With ``--no-decay-biases``, as in BYOL, biases
and normalisation parameters get neither that factor nor weight decay.

AdamW (Loshchilov & Hutter 2019) decays weights by ``lr * decay * w``, apart from the gradient, and never biases,
normalisation parameters, and what timm exempts by name in transformers (embeddings of positions, tokens). Its betas are
``--momentum`` and 0.999.
"""

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from timm.optim.lars import Lars
from torch import Tensor, nn
from torch.optim import Optimizer

from cocor.config.options import Config
from cocor.methods.base import Method
from loaders.errors import UserError


@dataclass(frozen=True)
class Cosine:
    """Factor on a base learning rate: a wait, linear warm-up, cosine to ``final``.

    A pure function of the step, so that resuming needs no state. All lengths are in optimiser steps, which are numbered
    from 0. The cosine reaches ``final`` at step ``total``, so that the last step, ``total - 1``, is still above it.
    """

    total: int
    warmup: int = 0
    wait: int = 0
    final: float = 0.0

    def __post_init__(self) -> None:
        if min(self.total, self.warmup, self.wait) < 0 or self.wait + self.warmup > self.total:
            ends = f"warm-up ends at step {self.wait + self.warmup}, training at step {self.total}"
            raise UserError(f"schedule: {ends}; shorten the warm-up or train for more epochs")

    def __call__(self, step: int) -> float:
        """Return the factor for optimiser step ``step``."""
        if step < self.wait:
            return 0.0
        step -= self.wait
        if step < self.warmup:
            return (step + 1) / (self.warmup + 1)
        rest = self.total - self.wait - self.warmup
        progress = min(1.0, (step - self.warmup) / rest) if rest else 1.0
        return self.final + (1.0 - self.final) * 0.5 * (1.0 + math.cos(math.pi * progress))


def build_optimiser(config: Config, method: Method, heads: nn.Module | None = None) -> Optimizer:
    """Build the optimiser of encoder and ``heads``; the caller respects ``fixed_lr``."""
    groups: list[dict[str, Any]] = [
        {**group, "params": [p for p in group["params"] if p.requires_grad]}  # timm freezes some
        for group in method.parameter_groups(config.weight_decay)
    ]
    if config.optimiser != "lars":
        groups = [{key: value for key, value in group.items() if key != "lr_share"} for group in groups]
    if heads is not None and (own := [p for p in heads.parameters() if p.requires_grad]):
        groups.append({"params": own, "weight_decay": config.weight_decay, "fixed_lr": False})
    if config.optimiser == "adamw":
        groups = [part for group in groups for part in _split(group, _undecayed(method.backbone))]
        on_gpu = groups[0]["params"][0].device.type == "cuda"
        return torch.optim.AdamW(groups, config.lr, (config.momentum, 0.999), fused=on_gpu, capturable=on_gpu)
    if not config.decay_biases:
        groups = [part for group in groups for part in _split(group)]
    if config.optimiser == "lars":
        return Lars(groups, lr=config.lr, momentum=config.momentum, always_adapt=True)
    return sgd(groups, config.lr, config.momentum)


def sgd(parameters: Iterable[Any], lr: float, momentum: float, weight_decay: float = 0.0) -> torch.optim.SGD:
    """Build SGD of parameters or parameter groups; fused into one kernel on a GPU."""
    parameters = list(parameters)
    first = parameters[0]["params"][0] if isinstance(parameters[0], dict) else parameters[0]
    fused = first.device.type == "cuda"
    return torch.optim.SGD(parameters, lr=lr, momentum=momentum, weight_decay=weight_decay, fused=fused)


def adam(parameters: Iterable[Tensor], lr: float, momentum: float) -> torch.optim.Adam:
    """Build Adam without decay; one kernel on a GPU, which a CUDA graph can hold."""
    parameters = list(parameters)
    on_gpu = parameters[0].device.type == "cuda"
    return torch.optim.Adam(parameters, lr=lr, betas=(momentum, 0.999), fused=on_gpu, capturable=on_gpu)


def set_rate(group: dict[str, Any], rate: float) -> None:
    """Give ``group`` of an optimiser its learning rate for the coming step."""
    if isinstance(group["lr"], Tensor):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate


def rates_to_device(optimiser: Optimizer) -> None:
    """Hold the learning rates in tensors; ``load_state_dict`` makes them numbers."""
    for group in optimiser.param_groups:
        if not isinstance(group["lr"], Tensor):
            group["lr"] = torch.tensor(group["lr"], dtype=torch.float32, device=group["params"][0].device)


def state_of(optimiser: Optimizer) -> dict[str, Any]:
    """Return the optimiser's ``state_dict``, with numbers for learning rates."""
    state = optimiser.state_dict()
    groups = [{**group, "lr": float(group["lr"])} for group in state["param_groups"]]
    return {**state, "param_groups": groups}


def load_state(optimiser: Optimizer, state: dict[str, Any]) -> None:
    """Load what :func:`state_of` returned, also on another kind of device."""
    own = [{key: group[key] for key in ("fused", "capturable") if key in group} for group in optimiser.param_groups]
    groups = [{**group, **kept} for group, kept in zip(state["param_groups"], own, strict=True)]
    optimiser.load_state_dict({**state, "param_groups": groups})


def _split(group: dict[str, Any], others: Collection[Tensor] = ()) -> list[dict[str, Any]]:
    """Split ``group`` into weights, and parameters without decay and LARS' factor.

    The latter are biases, normalisation parameters and ``others``.
    """
    exempt = {id(p) for p in others} | {id(p) for p in group["params"] if p.ndim <= 1}
    weights, rest = ([p for p in group["params"] if (id(p) in exempt) == out] for out in (False, True))
    parts = [{**group, "params": weights}, {**group, "params": rest, "weight_decay": 0.0, "always_adapt": False}]
    return [part for part in parts if part["params"]]


def _undecayed(backbone: nn.Module) -> list[Tensor]:
    """Return the parameters that timm exempts from weight decay by their names."""
    names: set[str] = getattr(backbone, "no_weight_decay", set)()
    return [p for name, p in backbone.named_parameters() if name in names]


@torch.no_grad()
def clip(gradients: list[Tensor], most: float) -> Tensor:
    """Clip ``gradients`` in place to a global norm of ``most``; return the norm before."""
    norm = torch.stack(torch._foreach_norm(gradients)).norm()
    torch._foreach_mul_(gradients, (most / norm).clamp(max=1.0))
    return norm
