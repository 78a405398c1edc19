"""Test ``configs/demo.yaml``, which a new user starts with, shortened to a few steps."""

import shutil
from pathlib import Path

import pytest
import yaml
from helpers.runs import ROOT, Capture, metrics

from cocor.train import main

RECIPE = ROOT / "configs" / "demo.yaml"
TILES = 30  # a class that the short run sees


@pytest.fixture
def demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where ``data: demo`` makes its tiles: an empty cache, as on a fresh machine."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "cocor" / "demo"


def test_the_demo_makes_its_data_and_learns(demo: Path, tmp_path: Path, capsys: Capture) -> None:
    command = ["--config", str(RECIPE), "--gpus", "0", "--workers", "1"]
    assert main([*command, "--dry-run"]) == 0
    assert "loss after 2 steps" in capsys.readouterr().out
    assert len(list(demo.glob("train/*/*.jpg"))) == 3000

    few, output = tmp_path / "few", tmp_path / "run"
    for tile in demo.glob("*/*/*.jpg"):
        if int(tile.stem.rpartition("_")[2]) < TILES:
            (few / tile.relative_to(demo)).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(tile, few / tile.relative_to(demo))
    short = ["--data", str(few), "--output", str(output), "--epochs", "2", "--warmup-epochs", "0", "--log-every", "1"]
    assert main([*command, *short]) == 0
    lines, per_epoch = metrics(output, "train"), 10 * TILES // yaml.safe_load(RECIPE.read_text())["batch_size"]
    assert [line["step"] for line in lines] == list(range(1, 2 * per_epoch + 1))
    assert all(line["contrastive_feature_std"] > 0.05 and line["hypergradient_norm"] > 0 for line in lines)
    first, last = metrics(output, "knn")[0], metrics(output, "knn")[-1]
    assert (first["epoch"], last["epoch"], last["queries"], last["bank"]) == (0, 2, 10 * TILES, 10 * TILES)
    assert (output / "backbone.safetensors").is_file() and (output / "views.png").is_file()
