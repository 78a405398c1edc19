"""Transformers and ConvNeXts of timm's train, are evaluated and exported like ResNets."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from helpers import runs

from cocor.backbone import build_backbone
from cocor.config.options import Config
from cocor.eval.cli import main as evaluate
from cocor.eval.export.command import main as export
from cocor.models import start_from
from cocor.train import main
from cocor.weights.load import load_encoder
from loaders.errors import UserError

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
    assert export([str(run), "--to", "timm", "hub", "--output", str(output)]) == 0
    shape = {} if backbone == "test_convnext" else {"img_size": size, "patch_size": 4 if stem == "small" else 16}
    path = output / "run.safetensors"
    model = timm.create_model(backbone, num_classes=0, checkpoint_path=str(path), **shape).eval()
    sample = torch.rand(2, 3, size, size)
    assert torch.equal(model(sample), encoder.backbone(sample))
    card = (output / "run" / "README.md").read_text()
    assert ("patch_size=4" in card) == (stem == "small") and "conv1" not in card


@pytest.mark.parametrize(("backbone", "stem", "size"), BACKBONES)
def test_init_reads_what_is_evaluated(tmp_path: Path, caplog: pytest.LogCaptureFixture, backbone: str, stem: Any,
                                      size: int) -> None:  # fmt: skip
    """Here MoCo's layout, with a head, of a model for images of timm's size."""
    caplog.set_level("INFO")
    trained, started = (build_backbone(backbone, stem, side) for side in (None, size))
    state = {f"module.encoder_q.{name}": value for name, value in trained.state_dict().items()}
    torch.save({"state_dict": state | {"module.encoder_q.fc.weight": torch.zeros(2, 2)}}, tmp_path / "moco.pth.tar")
    start_from(started, Config(backbone=backbone, stem=stem, image_size=size, init=tmp_path / "moco.pth.tar"))
    weights = trained.state_dict()
    assert all(torch.equal(v, weights[name]) for name, v in started.state_dict().items() if name != "pos_embed")
    assert f"{len(weights)} of {len(weights)} tensors loaded, 1 of other parts left" in caplog.text


def test_init_refuses_what_does_not_fit(tmp_path: Path) -> None:
    state = {f"encoder.{name}": value for name, value in build_backbone("resnet18").state_dict().items()}
    for name, place in (("whole", 0), ("half", len(state) // 2)):
        torch.save(dict(list(state.items())[place:]), tmp_path / name)
    small, usual = (Config(backbone="resnet18", stem=stem) for stem in ("small", "imagenet"))
    for config, init, message in (
        (usual, "half", "no encoder|tensors of resnet18 match"),
        (small, "whole", "conv1.weight.*another model with --backbone or --stem"),
        (usual, "timm:no", "no such model"),
    ):
        path = Path(init) if ":" in init else tmp_path / init
        with pytest.raises(UserError, match=message):
            start_from(build_backbone("resnet18", config.stem), replace(config, init=path))
