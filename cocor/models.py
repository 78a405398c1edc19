"""Build networks from a configuration: backbone, method, source of targets."""

import copy
import difflib
from contextlib import suppress
from pathlib import Path
from typing import Any

import timm
import torch
from torch import nn

from cocor import checkpoint
from cocor.auxiliary import AUXILIARIES
from cocor.auxiliary.base import Auxiliary
from cocor.config.options import Config
from cocor.distributed.collectives import World, broadcast_parameters, exchange, gather
from cocor.methods import method_class
from cocor.methods.base import Method, Ranks
from cocor.methods.batchnorm import synchronise_batch_norm
from cocor.objective.mmnn import MMNN, Constants, by_length
from loaders.errors import UserError

SMALL_PATCH = 4  # pixels a side of a small stem's patches


def build_backbone(name: str, stem: str = "imagenet", image_size: int | None = None) -> nn.Module:
    """Build a timm model without classifier: (B, 3, H, W) -> features (B, D).

    ``stem`` "small" is the usual change for images of 32 to 64 pixels: a ResNet's first convolution of 3x3 with stride
    1, and no pooling after it; a transformer's patches of 4 pixels. ``image_size`` is H = W, if not timm's default;
    models with position embeddings are built for it.

    Raises:
        UserError: an unknown name, a size that the model cannot take, a small stem for a model that has no such stem.
    """
    if not timm.is_model(name):
        close = difflib.get_close_matches(name, timm.list_models(), n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise UserError(f"--backbone {name}: timm has no such model{hint}")
    model = _create(name, image_size)
    if stem == "small":
        model = _small_stem(model, name, image_size)
    if image_size is not None:
        _try_size(model, name, image_size, "--image-size")
    return model


def _create(name: str, image_size: int | None, **options: Any) -> nn.Module:
    about = timm.get_pretrained_cfg(name)
    if image_size is not None and about is not None and about.fixed_input_size:
        with suppress(TypeError):  # not all models of a fixed size accept img_size
            return timm.create_model(name, num_classes=0, img_size=image_size, **options)
    return timm.create_model(name, num_classes=0, **options)


def _small_stem(model: nn.Module, name: str, image_size: int | None) -> nn.Module:
    """Return ``model``, which is timm's ``name``, with a small stem."""
    patches = getattr(getattr(model, "patch_embed", None), "proj", None)
    if isinstance(patches, nn.Conv2d) and patches.stride[0] > SMALL_PATCH:
        with suppress(TypeError):  # not all models accept patch_size
            return _create(name, image_size, patch_size=SMALL_PATCH)
    first = getattr(model, "conv1", None)
    if not isinstance(first, nn.Conv2d) or not hasattr(model, "maxpool"):
        raise UserError(f"--stem small: {name} has no ResNet stem nor large patches; use --stem imagenet")
    model.conv1 = nn.Conv2d(3, first.out_channels, 3, stride=1, padding=1, bias=False)
    nn.init.kaiming_normal_(model.conv1.weight, mode="fan_out", nonlinearity="relu")
    model.maxpool = nn.Identity()
    return model


def fixed_size(backbone: nn.Module) -> int | None:
    """Return the image side for which position embeddings are made, or None."""
    sides = getattr(getattr(backbone, "patch_embed", None), "img_size", None)
    return None if sides is None else int(sides[0])


def _try_size(model: nn.Module, name: str, size: int, flag: str) -> None:
    """Raise a UserError if ``model`` cannot take images of this size."""
    shapes_only = copy.deepcopy(model).to("meta").eval()
    try:
        with torch.no_grad():
            shapes_only(torch.empty(2, 3, size, size, device="meta"))
    except NotImplementedError:  # an operation without a meta kernel: the first batch will show
        return
    except (AssertionError, RuntimeError, ValueError) as error:
        usual = timm.get_pretrained_cfg(name)
        other = f"such as {usual.input_size[-1]}" if usual is not None else "or another --backbone"
        why = " ".join(str(error).split())[:100]
        raise UserError(f"{flag} {size}: {name} cannot take it ({why}); use another, {other}") from None


def build_method(config: Config, world: World) -> Method:
    """Build the method of ``config``, with equal weights on all ranks.

    They depend on ``seed`` alone, but for a backbone from ``--init``, which is not read if a checkpoint is to be
    resumed.
    """
    torch.manual_seed(config.seed)
    backbone = build_backbone(config.backbone, config.stem, config.image_size)
    if config.composite_size:
        _try_size(backbone, config.backbone, config.composite_size, "--composite-size")
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
