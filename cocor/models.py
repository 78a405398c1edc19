"""Build networks from a configuration: backbone, method, source of targets."""

from pathlib import Path

import torch
from torch import nn

from cocor import checkpoint
from cocor.auxiliary import AUXILIARIES
from cocor.auxiliary.base import Auxiliary
from cocor.backbone import build_backbone, try_size
from cocor.config.options import Config
from cocor.distributed.collectives import World, broadcast_parameters, exchange, gather
from cocor.methods import method_class
from cocor.methods.base import Method, Ranks
from cocor.methods.batchnorm import synchronise_batch_norm
from cocor.objective.mmnn import MMNN, Constants, by_length
from loaders.errors import UserError


def build_method(config: Config, world: World) -> Method:
    """Build the method of ``config``, with equal weights on all ranks.

    They depend on ``seed`` alone, but for a backbone from ``--init``, which is not read if a checkpoint is to be
    resumed.
    """
    torch.manual_seed(config.seed)
    backbone = build_backbone(config.backbone, config.stem, config.image_size)
    if config.composite_size:
        try_size(backbone, config.backbone, config.composite_size, "--composite-size")
    if config.init is not None and not checkpoint.exists(config.resume, config.output):
        load_backbone(backbone, config.init)
    ranks = Ranks(world.rank, world.size, gather, exchange)
    method: Method = method_class(config.method).from_config(config, ranks, backbone)
    if config.sync_bn and world.size > 1:
        for name, part in method.named_children():
            if name not in method.own_batch_norm:
                setattr(method, name, synchronise_batch_norm(part, world.device))
    method = method.to(world.device)
    if world.device.type == "cuda":
        method = method.to(memory_format=torch.channels_last)
    broadcast_parameters(method)
    return method


def build_target(config: Config, world: World) -> nn.Module | None:
    """Build the source of targets: MMNN, constants (1 without any), or None without loss."""
    if config.consistency == "none":
        return None
    constants = by_length((1.0, 1.0) if config.mmnn == "none" else config.constants)
    target: nn.Module = MMNN(constants, config.mmnn_shape) if config.mmnn == "learned" else Constants(constants)
    return target.to(world.device)


def build_auxiliary(config: Config, method: Method, world: World) -> Auxiliary | None:
    """Build the auxiliary with its heads, equal on all ranks; None without any."""
    if config.auxiliary == "none":
        return None
    auxiliary: Auxiliary = method_class(config.auxiliary, AUXILIARIES)(config, method)
    if world.size > 1:
        synchronise_batch_norm(auxiliary, world.device)
    auxiliary = auxiliary.to(world.device)
    broadcast_parameters(auxiliary)
    return auxiliary


def load_backbone(backbone: nn.Module, path: Path) -> None:
    """Load all weights in ``path``, exported or a checkpoint, into ``backbone``.

    Raises:
        UserError: the file is missing or unreadable, or its names and shapes are not all those of ``backbone``.
    """
    weights = checkpoint.read_backbone(path)
    wanted = backbone.state_dict()
    unfit = sorted(set(weights) ^ set(wanted)) or sorted(k for k in wanted if weights[k].shape != wanted[k].shape)
    if unfit:
        count = f"{len(unfit)} of {len(wanted)} weights"
        raise UserError(f"{path}: {count} do not fit --backbone and --stem, such as {unfit[0]}")
    backbone.load_state_dict(weights)
