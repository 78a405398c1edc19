"""Build encoders by timm's names, with stems for small images."""

import copy
import difflib
from contextlib import suppress
from typing import Any

import timm
import torch
from torch import nn

from loaders.errors import UserError

SMALL_PATCH = 4  # pixels a side of a small stem's patches


def build_backbone(
    name: str, stem: str = "imagenet", image_size: int | None = None, in_chans: int = 3
) -> nn.Module:  # fmt: skip
    """Build a timm model without classifier: (B, C, H, W) -> features (B, D).

    ``stem`` "small" is the usual change for images of 32 to 64 pixels: a ResNet's first convolution of 3x3 with stride
    1, and no pooling after it; a transformer's patches of 4 pixels. ``image_size`` is H = W, if not timm's default;
    models with position embeddings are built for it. ``in_chans`` are the channels of the images.

    Raises:
        UserError: an unknown name, a size that the model cannot take, a small stem for a model that has no such stem.
    """
    if not timm.is_model(name):
        close = difflib.get_close_matches(name, timm.list_models(), n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise UserError(f"--backbone {name}: timm has no such model{hint}")
    model = _create(name, image_size, in_chans=in_chans)
    if stem == "small":
        model = _small_stem(model, name, image_size, in_chans)
    if image_size is not None:
        try_size(model, name, image_size, "--image-size", in_chans)
    return model


def _create(name: str, image_size: int | None, **options: Any) -> nn.Module:
    about = timm.get_pretrained_cfg(name)
    if image_size is not None and about is not None and about.fixed_input_size:
        with suppress(TypeError):  # not all models of a fixed size accept img_size
            return timm.create_model(name, num_classes=0, img_size=image_size, **options)
    return timm.create_model(name, num_classes=0, **options)


def _small_stem(model: nn.Module, name: str, image_size: int | None, in_chans: int) -> nn.Module:
    """Return ``model``, which is timm's ``name``, with a small stem."""
    patches = getattr(getattr(model, "patch_embed", None), "proj", None)
    if isinstance(patches, nn.Conv2d) and patches.stride[0] > SMALL_PATCH:
        with suppress(TypeError):  # not all models accept patch_size
            return _create(name, image_size, in_chans=in_chans, patch_size=SMALL_PATCH)
    first = getattr(model, "conv1", None)
    if not isinstance(first, nn.Conv2d) or not hasattr(model, "maxpool"):
        raise UserError(f"--stem small: {name} has no ResNet stem nor large patches; use --stem imagenet")
    model.conv1 = nn.Conv2d(in_chans, first.out_channels, 3, stride=1, padding=1, bias=False)
    nn.init.kaiming_normal_(model.conv1.weight, mode="fan_out", nonlinearity="relu")
    model.maxpool = nn.Identity()
    return model


def fixed_size(backbone: nn.Module) -> int | None:
    """Return the image side for which position embeddings are made, or None."""
    sides = getattr(getattr(backbone, "patch_embed", None), "img_size", None)
    return None if sides is None else int(sides[0])


def try_size(model: nn.Module, name: str, size: int, flag: str, in_chans: int = 3) -> None:
    """Raise a UserError if ``model`` cannot take images of this size."""
    shapes_only = copy.deepcopy(model).to("meta").eval()
    try:
        with torch.no_grad():
            shapes_only(torch.empty(2, in_chans, size, size, device="meta"))
    except NotImplementedError:  # an operation without a meta kernel: the first batch will show
        return
    except (AssertionError, RuntimeError, ValueError) as error:
        usual = timm.get_pretrained_cfg(name)
        other = f"such as {usual.input_size[-1]}" if usual is not None else "or another --backbone"
        why = " ".join(str(error).split())[:100]
        raise UserError(f"{flag} {size}: {name} cannot take it ({why}); use another, {other}") from None
