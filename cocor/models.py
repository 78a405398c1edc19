"""Build networks from a configuration: backbone, method, source of targets."""

import logging
from functools import partial

import torch
from torch import nn

from cocor import checkpoint
from cocor.auxiliary import AUXILIARIES
from cocor.auxiliary.base import Auxiliary
from cocor.backbone import build_backbone, fixed_size, try_size
from cocor.config.options import Config
from cocor.config.parse import shown
from cocor.distributed.collectives import World, broadcast_parameters, exchange, gather, main_first
from cocor.methods import method_class
from cocor.methods.base import Method, Ranks
from cocor.methods.batchnorm import synchronise_batch_norm
from cocor.objective.mmnn import MMNN, Constants, by_length
from cocor.weights.load import load_encoder
from loaders.errors import UserError

_log = logging.getLogger(__name__)


def build_method(config: Config, world: World) -> Method:
    """Build the method of ``config``, with equal weights on all ranks.

    They depend on ``seed`` alone, but for a backbone from ``--init``, which is not read if a checkpoint is to be
    resumed.
    """
    torch.manual_seed(config.seed)
    backbone = build_backbone(config.backbone, config.stem, config.image_size, config.in_chans)
    if config.composite_size:
        try_size(backbone, config.backbone, config.composite_size, "--composite-size", config.in_chans)
    if config.init is not None and not checkpoint.exists(config.resume, config.output):
        start_from(backbone, config)
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
    """Build the source of targets: MMNN, constants (1 without any) or None."""
    if config.consistency == "none":
        return None
    constants = by_length((1.0, 1.0) if config.mmnn == "none" else config.constants)
    if config.mmnn == "learned":
        return MMNN(constants, config.mmnn_shape, config.mmnn_layers).to(world.device)
    return Constants(constants).to(world.device)


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


def start_from(backbone: nn.Module, config: Config) -> None:
    """Load the weights that ``--init`` names into ``backbone``, of any known origin.

    Position embeddings are resampled to ``--image-size``. A line in the log counts what was loaded.

    Raises:
        UserError: no weights there, or they are not all that ``backbone`` needs.
    """
    with torch.random.fork_rng(devices=[]):  # the heads depend on the seed alone
        build = partial(load_encoder, architecture=config.backbone, stem=config.stem, in_chans=config.in_chans)
        encoder = main_first(lambda: build(str(config.init)))
    model = encoder.backbone
    resample = getattr(model, "set_input_size", None)
    if resample is not None and fixed_size(model) not in (None, config.image_size):
        resample(img_size=config.image_size)
    has, needs = ({name: value.shape for name, value in part.state_dict().items()} for part in (model, backbone))
    unfit = sorted({name for name, _ in has.items() ^ needs.items()})
    if unfit:
        what = f"{len(unfit)} of its tensors do not fit --backbone {config.backbone} --stem {config.stem} "
        what += f"--in-chans {config.in_chans}"
        raise UserError(f"--init {config.init}: {what}, such as {unfit[0]}")
    backbone.load_state_dict(model.state_dict())
    _log.info(f"--init {encoder.describe()}")
    if encoder.origin in ("cocor", "timm") and (encoder.mean, encoder.std) != (config.mean, config.std):
        its = f"--mean {shown(encoder.mean)} --std {shown(encoder.std)}"
        _log.warning(f"--init {encoder.name} comes from images normalised by {its}, which this run does not have")
