"""Test that the files in configs/ load, say what they reproduce and cost, and make steps."""

import re
from pathlib import Path

import pytest
import yaml
from helpers.runs import ROOT, Capture

from cocor.backbone import build_backbone
from cocor.config.resolve import load
from cocor.train import main

CONFIGS = ROOT / "configs"
FILES = sorted(CONFIGS.glob("*.yaml"))
OF_THE_PAPER = [file for file in FILES if "in100" in file.stem or "in1k" in file.stem]


@pytest.mark.parametrize("file", OF_THE_PAPER, ids=lambda file: file.stem)
def test_headers_say_result_and_cost(file: Path) -> None:
    header = " ".join(line[1:].strip() for line in file.read_text().splitlines() if line.startswith("#"))
    assert re.search(r"Paper, linear evaluation on ImageNet-\w+, top-1", header)
    assert re.search(r"Projected on 4 H100.* hours", header) and "moco_in1k.yaml" in header + file.name
    assert f"cocor-train --config configs/{file.name}" in header


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_recipe_makes_steps(file: Path, tmp_path: Path, capsys: Capture) -> None:
    """With a network, a queue and images of a size for tests."""
    small = {"backbone": "test_resnet", "stem": "imagenet", "image_size": 32, "batch_size": 8, "queue_size": 32}
    small |= {"key_bn_splits": 2, "embedding_dim": 16, "projector_dim": 16, "predictor_dim": 8}
    recipe = tmp_path / "small.yaml"
    recipe.write_text(yaml.safe_dump({"defaults": str(file), **small}))
    flags = "--loader synthetic --synthetic-images 32 --gpus 0 --dry-run"
    assert main(["--config", str(recipe), *flags.split()]) == 0
    assert load(["--config", str(file)]).output == Path("runs") / file.stem and file.read_text().startswith("# ")
    assert "loss after 2 steps: " in capsys.readouterr().out


def test_the_vit_of_its_recipe_trains(tmp_path: Path, capsys: Capture) -> None:
    """The network itself, on a small batch: 64 patches of 4 pixels and a class token."""
    small = "--loader synthetic --synthetic-images 16 --gpus 0 --dry-run --batch-size 4 --labelled-batch-size 4"
    assert main(["--config", str(CONFIGS / "cifar10_vit.yaml"), *small.split(), "--queue-size", "32"]) == 0
    shown = capsys.readouterr().out
    assert "loss after 2 steps: " in shown and "vit_tiny_patch16_224" in shown
    config = load(["--config", str(CONFIGS / "cifar10_vit.yaml")])
    network = build_backbone(config.backbone, config.stem, config.image_size)
    assert dict(network.named_parameters())["pos_embed"].shape == (1, 65, 192)
