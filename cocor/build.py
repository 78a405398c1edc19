"""From a configuration to networks: the timm backbone, the contrastive method around it, the source of targets."""

import difflib
from pathlib import Path
from typing import Any

import timm
import torch
from torch import nn

from cocor.config import Config, key_bn_groups
from cocor.distributed import World, broadcast_parameters, gather
from cocor.methods.base import Method
from cocor.methods.byol import BYOL
from cocor.methods.intl import INTL
from cocor.methods.moco import MoCo
from cocor.methods.simsiam import SimSiam
from cocor.methods.supcon import SupCon
from cocor.methods.sync_norm import synchronise_batch_norm
from cocor.mmnn import MMNN, Constants
from loaders.errors import UserError


def build_backbone(name: str, stem: str = "imagenet") -> nn.Module:
    """A randomly initialised timm model without classifier: images (B, 3, H, W) -> features (B, D).

    ``stem`` "small" is the usual change for images of 32 to 64 pixels: a first convolution of 3x3 with stride 1, and no
    pooling behind it. UserError for unknown names and for models whose stem is not a ResNet's.
    """
    if not timm.is_model(name):
        close = difflib.get_close_matches(name, timm.list_models(), n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise UserError(f"--backbone {name}: timm has no such model{hint}")
    model: nn.Module = timm.create_model(name, num_classes=0)
    if stem == "small":
        first = getattr(model, "conv1", None)
        if not isinstance(first, nn.Conv2d) or not hasattr(model, "maxpool"):
            raise UserError(f"--stem small: {name} has no ResNet stem to replace; use --stem imagenet")
        model.conv1 = nn.Conv2d(3, first.out_channels, 3, stride=1, padding=1, bias=False)
        nn.init.kaiming_normal_(model.conv1.weight, mode="fan_out", nonlinearity="relu")
        model.maxpool = nn.Identity()
    return model


def build_method(config: Config, world: World) -> Method:
    """The method of ``config`` on ``world.device``, equal on all ranks; weights depend on ``seed`` alone."""
    torch.manual_seed(config.seed)
    backbone = build_backbone(config.backbone, config.stem)
    if config.init is not None:
        load_backbone(backbone, config.init)
    method = _method(config, world, backbone)
    if config.sync_bn and world.size > 1:
        _synchronise(method, world.device)
    method = method.to(world.device)
    if world.device.type == "cuda":
        method = method.to(memory_format=torch.channels_last)
    broadcast_parameters(method)
    return method


def _method(config: Config, world: World, backbone: nn.Module) -> Method:
    ranks: dict[str, Any] = {"gather": gather, "rank": world.rank, "world": world.size}
    if config.method == "moco":
        return MoCo(
            backbone,
            dim=config.embedding_dim,
            queue=config.queue_size,
            temperature=config.temperature,
            momentum=config.key_momentum,
            key_bn_splits=key_bn_groups(config, world.size),
            **ranks,
        )
    if config.method == "simsiam":
        return SimSiam(backbone, dim=config.projector_dim, predictor_dim=config.predictor_dim)
    if config.method == "supcon":
        return SupCon(backbone, dim=config.embedding_dim, temperature=config.temperature, **ranks)
    if config.method == "byol":
        return BYOL(
            backbone,
            dim=config.embedding_dim,
            hidden=config.projector_dim,
            predictor_dim=config.predictor_dim,
            momentum=config.key_momentum,
        )
    return INTL(
        backbone,
        dim=config.embedding_dim,
        hidden=config.projector_dim,
        iterations=config.whitening_iterations,
        trace_weight=config.trace_weight,
        **ranks,
    )


def _synchronise(method: Method, device: torch.device) -> None:
    """Let BatchNorm see the batches of all ranks, but for MoCo's keys, whose groups are MoCo's own way."""
    for name, part in method.named_children():
        if not (isinstance(method, MoCo) and name.startswith("key_")):
            setattr(method, name, synchronise_batch_norm(part, device))


def build_target(config: Config, world: World) -> nn.Module | None:
    """Where target similarities come from: the MMNN, the paper's constants, or None for the plain method."""
    if config.consistency == "none":
        return None
    constants = dict(enumerate(config.constants, start=1))
    target: nn.Module = MMNN(constants) if config.mmnn == "learned" else Constants(constants)
    return target.to(world.device)


def load_backbone(backbone: nn.Module, path: Path) -> None:
    """Load the weights in ``path`` (a backbone.safetensors or a checkpoint of a run) into ``backbone``, all of them.

    UserError if the file is missing, unreadable, or holds other weights.
    """
    from cocor.checkpoint import read_backbone

    weights = read_backbone(path)
    wanted = backbone.state_dict()
    strange = sorted(set(weights) ^ set(wanted)) or sorted(k for k in wanted if weights[k].shape != wanted[k].shape)
    if strange:
        raise UserError(
            f"{path}: {len(strange)} of {len(wanted)} weights do not fit --backbone and --stem, such as {strange[0]}"
        )
    backbone.load_state_dict(weights)
