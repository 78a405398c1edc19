"""Write a trained encoder for other programs, and check each file by loading it back.

    cocor-export runs/moco --to timm detectron2 --output exported/

    timm          NAME.safetensors   timm's names; create_model(..., checkpoint_path=FILE)
    torchvision   NAME.pth           a state_dict for torchvision.models (ResNets have the same names)
    safetensors   NAME/              model.safetensors, config.json, README.md: a folder for the Hugging Face Hub
    detectron2    NAME.pkl           numpy arrays by Detectron2's names, with matching_heuristics

Every file is loaded back, by the program that it is for if that is installed, and must give the same weights and
features. A small stem is refused if the other program's model has none.
"""

import json
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import safetensors.torch
import timm
import torch
import torchvision
from torch import Tensor, nn

import cocor
from cocor import checkpoint
from cocor.backbone import SMALL_PATCH, build_backbone, fixed_size
from cocor.checkpoint import export_backbone
from cocor.weights.load import Encoder, digest
from loaders.batch import IMAGENET_MEAN, IMAGENET_STD
from loaders.errors import UserError
from loaders.files import replacing, write_text

Format = Literal["timm", "torchvision", "safetensors", "detectron2"]

# Detectron2 builds wide ResNets and ResNeXts with WIDTH_PER_GROUP and NUM_GROUPS; none with other stems, norms or
# attention.
_IN_DETECTRON2 = re.compile(r"(resnet\d+|wide_resnet\d+_2|resnext\d+_\d+x\d+d)(\..+)?")


def export(encoder: Encoder, form: Format, output: Path) -> Path:
    """Write ``encoder`` to ``output``, and check it by loading it back.

    Raises:
        UserError: the format cannot hold this encoder, or the file cannot be written.
    """
    check_possible(encoder, form)
    FORMATS[form][1](encoder, output)
    return output


def check_possible(encoder: Encoder, form: Format) -> None:
    """Raise UserError if the format cannot hold this encoder."""
    if form == "torchvision":
        model = _torchvision_model(encoder)
        other = sorted(set(_weights(encoder)) ^ {name for name in model.state_dict() if not name.startswith("fc.")})
        if other:
            raise UserError(f"--to torchvision: {len(other)} weights have other names there, such as {other[0]}")
    if form == "detectron2":
        bottleneck = "layer1.0.conv3.weight" in _weights(encoder)
        if not bottleneck or encoder.stem != "imagenet" or not _IN_DETECTRON2.fullmatch(encoder.architecture):
            raise UserError("--to detectron2: its ResNets are bottleneck ones with the usual stem, such as resnet50; "
                            f"this is {encoder.architecture} with the {encoder.stem} stem")  # fmt: skip


def _weights(encoder: Encoder) -> dict[str, Tensor]:
    return {name: value.detach().cpu().contiguous().clone() for name, value in encoder.backbone.state_dict().items()}


def _write(encoder: Encoder, output: Path) -> None:
    about = {"architecture": encoder.architecture, "stem": encoder.stem, "image_size": encoder.image_size}
    export_backbone(encoder.backbone, output, about)


def _timm(encoder: Encoder, output: Path) -> None:
    _write(encoder, output)
    if encoder.stem == "imagenet":
        size = _size_option(encoder)
        model = timm.create_model(encoder.architecture, num_classes=0, checkpoint_path=str(output), **size)
    else:
        model = build_backbone(encoder.architecture, encoder.stem, _only_size(encoder))
        timm.models.load_checkpoint(model, str(output))
    _check_same(encoder, model, output)


def _only_size(encoder: Encoder) -> int | None:
    """Return the side in pixels of the images that the model is built for; None if it takes any size."""
    size, usual = fixed_size(encoder.backbone), timm.get_pretrained_cfg(encoder.architecture)
    if size is None and usual is not None and usual.fixed_input_size:  # windows or attention biases of one size
        return encoder.image_size
    return size


def _size_option(encoder: Encoder) -> dict[str, Any]:
    """Return the keyword with which timm builds the model for an image size that is not its default."""
    size, usual = _only_size(encoder), timm.get_pretrained_cfg(encoder.architecture)
    return {} if size is None or usual is None or usual.input_size[-1] == size else {"img_size": size}


def _torchvision(encoder: Encoder, output: Path) -> None:
    with replacing(output) as temporary:
        checkpoint.write(_weights(encoder), temporary)
    model = _torchvision_model(encoder)
    missing = model.load_state_dict(torch.load(output, weights_only=True), strict=False)
    if set(missing.missing_keys) - {"fc.weight", "fc.bias"} or missing.unexpected_keys:
        raise RuntimeError(f"{output} does not fit torchvision's {encoder.architecture}: {missing}")
    model.fc = nn.Identity()
    _check_same(encoder, model, output)


def _torchvision_model(encoder: Encoder) -> nn.Module:
    if encoder.architecture not in torchvision.models.list_models():
        raise UserError(f"--to torchvision: it has no {encoder.architecture}; use --to timm or --to safetensors")
    model: nn.Module = torchvision.models.get_model(encoder.architecture, weights=None)
    if encoder.stem == "small":
        width = encoder.backbone.state_dict()["conv1.weight"].shape[0]
        model.conv1 = nn.Conv2d(3, width, 3, padding=1, bias=False)
        model.maxpool = nn.Identity()
    return model


def _safetensors(encoder: Encoder, output: Path) -> None:
    weights, features = output / "model.safetensors", int(getattr(encoder.backbone, "num_features", 0))
    _write(encoder, weights)
    config = {"architecture": encoder.architecture, "num_classes": 0, "num_features": features, "stem": encoder.stem}
    pretrained = {"mean": IMAGENET_MEAN, "std": IMAGENET_STD, "interpolation": "bilinear", "crop_pct": 0.875}
    write_text(output / "config.json", json.dumps(config | {"pretrained_cfg": pretrained}, indent=2) + "\n")
    write_text(output / "README.md", model_card(encoder, features))
    model = build_backbone(encoder.architecture, encoder.stem, _only_size(encoder))
    model.load_state_dict(safetensors.torch.load_file(weights))
    _check_same(encoder, model, output)


def model_card(encoder: Encoder, features: int) -> str:
    """Write the README of an exported folder: contents, loading, normalisation."""
    small = ("model.conv1 = torch.nn.Conv2d(3, model.conv1.out_channels, 3, padding=1, bias=False)\n"
             "model.maxpool = torch.nn.Identity()\n")  # fmt: skip
    patches = hasattr(encoder.backbone, "patch_embed")
    stem = small if encoder.stem == "small" and not patches else ""
    parameters = sum(p.numel() for p in encoder.backbone.parameters())
    options = _size_option(encoder) | ({"patch_size": SMALL_PATCH} if encoder.stem == "small" and patches else {})
    size = "".join(f", {name}={value}" for name, value in options.items())
    return f"""---
library_name: timm
tags: [image-feature-extraction, self-supervised, cocor]
---
# {encoder.name}

A {encoder.architecture} image encoder ({parameters / 1e6:.1f} M parameters, {features} features, {encoder.stem} stem),
exported by cocor {cocor.__version__} from weights in the layout of {encoder.origin}.

```python
import timm, torch
from safetensors.torch import load_file

model = timm.create_model("{encoder.architecture}", num_classes=0{size})
{stem}model.load_state_dict(load_file("model.safetensors"))
```

Input: RGB in [0, 1], normalised with mean {IMAGENET_MEAN} and standard deviation {IMAGENET_STD}.
Weights: SHA-256 over names and values `{encoder.digest}`.

Not stated here, because the weights do not tell: training data, its licence, intended use, accuracy. Fill them in.
"""


def detectron2_name(name: str) -> str:
    """Derive Detectron2's name of a ResNet weight: layer1 -> res2, bn2 -> conv2.norm."""
    if not name.startswith("layer"):
        name = f"stem.{name}"
    for number in (1, 2, 3, 4):
        name = name.replace(f"layer{number}.", f"res{number + 1}.")
    for number in (1, 2, 3):
        name = name.replace(f"bn{number}.", f"conv{number}.norm.")
    return name.replace("downsample.0.", "shortcut.").replace("downsample.1.", "shortcut.norm.")


def _detectron2(encoder: Encoder, output: Path) -> None:
    weights = {name: v.numpy() for name, v in _weights(encoder).items() if not name.endswith("num_batches_tracked")}
    arrays = {detectron2_name(name): value for name, value in weights.items()}
    content = {"model": arrays, "__author__": "cocor", "matching_heuristics": True}
    with replacing(output) as temporary:
        temporary.write_bytes(pickle.dumps(content, protocol=4))
    found = pickle.loads(output.read_bytes())["model"]  # just written here
    equal = all(np.array_equal(found[detectron2_name(name)], value) for name, value in weights.items())
    if len(found) != len(weights) or not equal:
        raise RuntimeError(f"{output} does not hold the encoder's weights")
    names = detectron2_resnet_names(encoder.architecture)
    if names is not None and set(found) != names:
        raise RuntimeError(f"{output} differs from Detectron2's model in {sorted(set(found) ^ names)[:3]}")


def detectron2_resnet_names(architecture: str) -> set[str] | None:
    """List the weights of Detectron2's ResNet; None if it is not installed."""
    try:
        from detectron2.config import get_cfg
        from detectron2.modeling.backbone import build_resnet_backbone
    except ImportError:
        return None
    config = get_cfg()
    config.MODEL.RESNETS.DEPTH = int(re.findall(r"resne[tx]t?(\d+)", architecture)[0])
    config.MODEL.RESNETS.NORM = "BN"
    config.MODEL.RESNETS.OUT_FEATURES = ["res5"]
    state = build_resnet_backbone(config, None).state_dict()
    return {name for name in state if not name.endswith("num_batches_tracked")}


def _check_same(encoder: Encoder, model: nn.Module, output: Path) -> None:
    """Raise a RuntimeError unless ``model``, loaded from ``output``, has the encoder's weights and features."""
    if digest(model) != encoder.digest:
        raise RuntimeError(f"{output} does not give the encoder's weights back")
    side = _only_size(encoder) or 64
    sample = torch.rand(2, 3, side, side, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        if not torch.equal(model.eval()(sample), encoder.backbone.cpu()(sample)):
            raise RuntimeError(f"{output} does not give the encoder's features")


# Suffix, and what writes and checks each format.
FORMATS: dict[Format, tuple[str, Callable[[Encoder, Path], None]]] = {
    "timm": (".safetensors", _timm),
    "torchvision": (".pth", _torchvision),
    "safetensors": ("", _safetensors),
    "detectron2": (".pkl", _detectron2),
}
