"""Tiny methods and their inputs."""

import timm.layers
import torch
from torch import Tensor, nn

from cocor.methods.byol import BYOL
from cocor.methods.intl import INTL
from cocor.methods.supcon import SupCon


def backbone() -> nn.Module:
    torch.manual_seed(0)
    return timm.create_model("test_resnet", num_classes=0, zero_init_last=False)  # or inner layers get no gradient yet


def supcon() -> SupCon:
    return SupCon(backbone(), embedding_dim=8)


def byol() -> BYOL:
    method = BYOL(backbone(), embedding_dim=16, projector_dim=24, predictor_dim=8, key_momentum=0.9)
    method.total_steps = 10
    return method


def intl() -> INTL:
    return INTL(backbone(), embedding_dim=16, projector_dim=24, trace_weight=0.05)


LABELS = torch.tensor([0, 1, 0, 2, 1, 0])


def images(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, 3, 32, 32, generator=torch.Generator().manual_seed(seed))
