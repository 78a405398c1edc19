"""Write a trained encoder for other programs, and check each file by loading it back.

    timm          NAME.safetensors   timm's names
    torchvision   NAME.pth           a state_dict for torchvision.models (ResNets have the same names)
    hub           NAME/              model.safetensors, config.json, README.md: timm's folder for the Hugging Face Hub
    onnx          NAME.onnx          images to features, for any batch
    detectron2    NAME.pkl           numpy arrays by Detectron2's names, with matching_heuristics

Every file is loaded back, by the program that it is for if that is installed, and must give the same weights and
features.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import timm
import torch
import torchvision
from torch import nn

from cocor import checkpoint
from cocor.backbone import build_backbone
from cocor.eval.export import detectron2, hub, onnx
from cocor.eval.export.rebuild import (
    check_same,
    only_size,
    small_stem_lines,
    timm_knows,
    timm_lines,
    timm_options,
    weights_of,
    write_weights,
)
from cocor.weights.load import Encoder
from loaders.errors import UserError
from loaders.files import replacing

Name = Literal["timm", "torchvision", "hub", "onnx", "detectron2"]


@dataclass(frozen=True)
class Format:
    """File format: its suffix, what refuses an encoder, what writes and checks it, and how to load it."""

    suffix: str
    check: Callable[[Encoder], None]
    write: Callable[[Encoder, Path], None]
    lines: Callable[[Encoder, Path], str]


def export(encoder: Encoder, form: Name, output: Path) -> Path:
    """Write ``encoder`` to ``output``, and check it by loading it back.

    Raises:
        UserError: the format cannot hold this encoder, a package is missing, or the file cannot be written.
    """
    FORMATS[form].check(encoder)
    FORMATS[form].write(encoder, output)
    return output


def _timm(encoder: Encoder, output: Path) -> None:
    write_weights(encoder, output)
    if timm_knows(encoder):
        options = timm_options(encoder)
        model = timm.create_model(encoder.architecture, num_classes=0, checkpoint_path=str(output), **options)
    else:
        model = build_backbone(encoder.architecture, encoder.stem, only_size(encoder), encoder.channels)
        timm.models.load_checkpoint(model, str(output))
    check_same(encoder, model, output)


def _in_torchvision(encoder: Encoder) -> None:
    if encoder.channels != 3:
        raise UserError("--to torchvision: its models take colour images; use --to timm or --to hub")
    model = _torchvision_model(encoder)
    other = sorted(set(weights_of(encoder)) ^ {name for name in model.state_dict() if not name.startswith("fc.")})
    if other:
        raise UserError(f"--to torchvision: {len(other)} weights have other names there, such as {other[0]}")


def _torchvision(encoder: Encoder, output: Path) -> None:
    with replacing(output) as temporary:
        checkpoint.write(weights_of(encoder), temporary)
    model = _torchvision_model(encoder)
    model.fc = nn.Identity()
    model.load_state_dict(torch.load(output, weights_only=True))
    check_same(encoder, model, output)


def _torchvision_model(encoder: Encoder) -> nn.Module:
    if encoder.architecture not in torchvision.models.list_models():
        raise UserError(f"--to torchvision: it has no {encoder.architecture}; use --to timm or --to hub")
    model: nn.Module = torchvision.models.get_model(encoder.architecture, weights=None)
    if encoder.stem == "small":
        width = encoder.backbone.state_dict()["conv1.weight"].shape[0]
        model.conv1 = nn.Conv2d(3, width, 3, padding=1, bias=False)
        model.maxpool = nn.Identity()
    return model


def _torchvision_lines(encoder: Encoder, output: Path) -> str:
    stem = small_stem_lines(encoder) if encoder.stem == "small" else ""
    return (f"import torch, torchvision\nmodel = torchvision.models.{encoder.architecture}()\n{stem}"
            f"model.fc = torch.nn.Identity()\nmodel.load_state_dict(torch.load({str(output)!r}))\n")  # fmt: skip


def _any(encoder: Encoder) -> None:
    """Accept every encoder."""


FORMATS: dict[Name, Format] = {
    "timm": Format(".safetensors", _any, _timm, timm_lines),
    "torchvision": Format(".pth", _in_torchvision, _torchvision, _torchvision_lines),
    "hub": Format("", _any, hub.write, hub.lines),
    "onnx": Format(".onnx", onnx.check, onnx.write, onnx.lines),
    "detectron2": Format(".pkl", detectron2.check, detectron2.write, detectron2.lines),
}
