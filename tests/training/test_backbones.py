"""Transformers and ConvNeXts of timm's train, are evaluated and exported like ResNets."""

import json
from pathlib import Path

import pytest
import timm
import torch
from helpers import runs

from cocor.eval.cli import main as evaluate
from cocor.eval.export_cli import main as export
from cocor.eval.weights.load import load_encoder
from cocor.train import main

# A ViT's patches have 16 pixels, of a small stem 4; a ConvNeXt divides the side by 32.
BACKBONES = [("test_vit", "imagenet", 48), ("test_vit", "small", 32), ("test_convnext", "imagenet", 64)]


@pytest.mark.parametrize(("backbone", "stem", "size"), BACKBONES)
def test_it_trains_and_is_evaluated_and_exported(photo_folder: Path, tmp_path: Path, backbone: str, stem: str,
                                                 size: int) -> None:  # fmt: skip
    run, output = tmp_path / "run", tmp_path / "exported"
    options = {"backbone": backbone, "stem": stem, "image_size": size, "optimiser": "adamw", "lr": 1e-3}
    options |= {"clip_grad": 1.0, "loader": "torch", "data": photo_folder, "val_data": photo_folder, "output": run}
    assert main(runs.flags(**options)) == 0
    steps = runs.metrics(run, "train")
    assert all(step["gradient_norm"] > 0 and step["hypergradient_norm"] > 0 for step in steps)
    encoder = load_encoder(run)
    assert (encoder.architecture, encoder.stem, encoder.image_size) == (backbone, stem, size)
    call = ["knn", str(run), "--data", str(photo_folder), "--leave-one-out", "--output", str(tmp_path / "knn")]
    assert evaluate([*call, "--gpu", "no", "--workers", "0", "--k", "1"]) == 0
    assert 0 <= json.loads((tmp_path / "knn" / "knn.json").read_text())["result"][0]["accuracy"] <= 1
    assert export([str(run), "--to", "timm", "safetensors", "--output", str(output)]) == 0
    shape = {} if backbone == "test_convnext" else {"img_size": size, "patch_size": 4 if stem == "small" else 16}
    path = output / "run.safetensors"
    model = timm.create_model(backbone, num_classes=0, checkpoint_path=str(path), **shape).eval()
    sample = torch.rand(2, 3, size, size)
    assert torch.equal(model(sample), encoder.backbone(sample))
    card = (output / "run" / "README.md").read_text()
    assert ("patch_size=4" in card) == (stem == "small") and "conv1" not in card
