"""``backbone.safetensors``: the trained encoder alone, under timm's own names, for any other program.

    timm.create_model("resnet50", num_classes=0, checkpoint_path="runs/NAME/backbone.safetensors")

With a new head: ``timm.create_model("resnet50", pretrained=True, num_classes=10, pretrained_cfg_overlay=dict(
file="runs/NAME/backbone.safetensors", num_classes=0))``. ResNets also fit torchvision's, whose names are the same, with
``load_state_dict(..., strict=False)``. A model with ``--stem small`` differs from timm's in its first layers:

    model = timm.create_model("resnet18", num_classes=0)
    model.conv1, model.maxpool = nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.Identity()
    timm.models.load_checkpoint(model, "runs/NAME/backbone.safetensors")

A transformer that was trained at another image size than timm's default needs that as well: ``img_size=96``.

The file's metadata hold architecture, stem and image size; a run's also method and step.
"""

from collections.abc import Mapping
from pathlib import Path

import safetensors.torch
from torch import nn

from cocor.checkpoint import portable
from loaders.files import replacing


def export_backbone(backbone: nn.Module, path: Path, metadata: Mapping[str, object]) -> None:
    """Write the weights and buffers of ``backbone`` to ``path``, whole or not at all; ``metadata`` becomes text.

    Raises:
        UserError: the disk is full or the folder not writable.
    """
    # safetensors takes neither channels-last tensors nor two names for one memory.
    weights = {name: value.contiguous().clone() for name, value in portable(backbone.state_dict()).items()}
    content = safetensors.torch.save(weights, {"format": "pt", **{key: str(value) for key, value in metadata.items()}})
    with replacing(path) as temporary:
        temporary.write_bytes(content)
