"""Rebuild an encoder as other programs do, and compare its weights and features."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
from torch import Tensor, nn

from cocor.backbone import SMALL_PATCH, fixed_size
from cocor.checkpoint import export_backbone
from cocor.weights.load import Encoder, digest

_TOLERANCE = 1e-4  # of other programs' arithmetic, relative to the largest feature


def preprocessing(encoder: Encoder) -> dict[str, Any]:
    """Return what images have to be: ``pretrained_cfg`` of timm, ONNX's metadata, the model card."""
    return {"mean": encoder.mean, "std": encoder.std, "interpolation": "bilinear", "crop_pct": 0.875}


def weights_of(encoder: Encoder) -> dict[str, Tensor]:
    """Copy the weights to contiguous tensors on the CPU."""
    return {name: value.detach().cpu().contiguous().clone() for name, value in encoder.backbone.state_dict().items()}


def write_weights(encoder: Encoder, output: Path) -> None:
    """Write a ``.safetensors`` file that also tells this project model and images."""
    about = {"architecture": encoder.architecture, "stem": encoder.stem, "image_size": encoder.image_size}
    about |= {"mean": list(encoder.mean), "std": list(encoder.std)}
    export_backbone(encoder.backbone, output, about)


def only_size(encoder: Encoder) -> int | None:
    """Return the side in pixels of the images that the model is built for; None if it takes any size."""
    size, usual = fixed_size(encoder.backbone), timm.get_pretrained_cfg(encoder.architecture)
    if size is None and usual is not None and usual.fixed_input_size:  # windows or attention biases of one size
        return encoder.image_size
    return size


def timm_options(encoder: Encoder) -> dict[str, Any]:
    """Return the keywords with which timm builds the model for its images and patches."""
    size, usual = only_size(encoder), timm.get_pretrained_cfg(encoder.architecture)
    options = {} if size is None or usual is None or usual.input_size[-1] == size else {"img_size": size}
    options |= {} if encoder.channels == 3 else {"in_chans": encoder.channels}
    return options | ({"patch_size": SMALL_PATCH} if encoder.stem == "small" and _has_patches(encoder) else {})


def timm_knows(encoder: Encoder) -> bool:
    """Tell whether timm builds the model by name, which it does not with the small stem of a ResNet."""
    return encoder.stem == "imagenet" or _has_patches(encoder)


def _has_patches(encoder: Encoder) -> bool:
    return hasattr(encoder.backbone, "patch_embed")


def timm_lines(encoder: Encoder, weights: Path | str) -> str:
    """Return Python lines that build ``model`` by timm and load ``weights`` into it."""
    options = "".join(f", {name}={value}" for name, value in timm_options(encoder).items())
    if timm_knows(encoder):
        weights = f", checkpoint_path={str(weights)!r}"
        return f'import timm\nmodel = timm.create_model("{encoder.architecture}", num_classes=0{weights}{options})\n'
    return ("import timm, torch\nfrom safetensors.torch import load_file\n"
            f'model = timm.create_model("{encoder.architecture}", num_classes=0{options})\n'
            f"{small_stem_lines(encoder)}model.load_state_dict(load_file({str(weights)!r}))\n")  # fmt: skip


def small_stem_lines(encoder: Encoder) -> str:
    """Return Python lines that give the ResNet ``model``, of timm or torchvision, a small stem."""
    return (f"model.conv1 = torch.nn.Conv2d({encoder.channels}, model.conv1.out_channels, 3, padding=1, bias=False)\n"
            "model.maxpool = torch.nn.Identity()\n")  # fmt: skip


def check_same(encoder: Encoder, model: nn.Module, output: Path) -> None:
    """Raise a RuntimeError unless ``model``, loaded from ``output``, has the encoder's weights and features."""
    if digest(model) != encoder.digest:
        raise RuntimeError(f"{output} does not give the encoder's weights back")
    sample = sample_images(encoder, 2, only_size(encoder) or 64)
    with torch.no_grad():
        if not torch.equal(model.eval()(sample), encoder.backbone.cpu()(sample)):
            raise RuntimeError(f"{output} does not give the encoder's features")


def check_close(encoder: Encoder, run: Callable[[Tensor], np.ndarray], output: Path) -> None:
    """Raise a RuntimeError unless ``run`` gives the features to 1e-4 of the largest, in batches of 1 and 3."""
    for count in (1, 3):
        sample = sample_images(encoder, count, encoder.image_size)
        with torch.no_grad():
            wanted = encoder.backbone.cpu()(sample).numpy()
        found = run(sample)
        if found.shape != wanted.shape or not np.abs(found - wanted).max() <= _TOLERANCE * np.abs(wanted).max():
            raise RuntimeError(f"{output} does not give the encoder's features")


def sample_images(encoder: Encoder, count: int, side: int) -> Tensor:
    """Draw ``count`` normal images (count, C, side, side) for ``encoder``, the same in every call."""
    return torch.randn(count, encoder.channels, side, side, generator=torch.Generator().manual_seed(0))
