"""From a configuration to networks: the timm backbone, the contrastive method around it, the source of targets."""

import difflib
from pathlib import Path

import timm
import torch
from torch import nn

from cocor.config import Config, key_bn_groups
from cocor.distributed import World, broadcast_parameters, gather
from cocor.methods.base import Method
from cocor.methods.moco import MoCo
from cocor.methods.simsiam import SimSiam
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
    method: Method
    if config.method == "moco":
        method = MoCo(
            backbone,
            dim=config.embedding_dim,
            queue=config.queue_size,
            temperature=config.temperature,
            momentum=config.key_momentum,
            key_bn_splits=key_bn_groups(config, world.size),
            gather=gather,
            rank=world.rank,
            world=world.size,
        )
    else:
        method = SimSiam(backbone, dim=config.projector_dim, predictor_dim=config.predictor_dim)
    method = method.to(world.device)
    if world.device.type == "cuda":
        method = method.to(memory_format=torch.channels_last)
    broadcast_parameters(method)
    return method


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
