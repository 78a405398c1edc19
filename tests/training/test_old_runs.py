"""Test that a run of an older version goes on as that version would have."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.runs import TESTS
from timm.models import register_model
from timm.models.resnet import BasicBlock, ResNet

import cocor.eval.cli
import cocor.monitor.plot
from cocor.config.resolve import load
from cocor.train import main

# Half a run of commit 48d1010 on synthetic images, with its own config.yaml; only views.png is left out.
OLD = TESTS / "data" / "run-48d1010"


@register_model
def small_resnet(num_classes: int = 0, **options: Any) -> ResNet:
    """The backbone of that run, whose checkpoint is small."""
    return ResNet(BasicBlock, (2, 0, 0, 0), num_classes, channels=(8, 8, 8, 8), stem_width=4, stem_type="deep")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return Path(shutil.copytree(OLD, tmp_path / "run"))


def test_it_resumes(run: Path) -> None:
    assert main(["--config", str(run / "config.yaml"), "--output", str(run), "--resume"]) == 0
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    names = ("step", "loss", "labelled_loss", "similarity_3")
    found = [[line[name] for name in names] for line in lines if line["kind"] == "train"]
    expected = [  # by 48d1010 itself
        [5, 3.824636, 5.572415, 0.855955], [6, 3.498353, 5.053854, 0.920931],
        [7, 3.595310, 5.836142, 0.839121], [8, 2.933976, 5.790643, 0.904745],
    ]  # fmt: skip
    assert [row[0] for row in found] == list(range(1, 9))
    assert found[4:] == [pytest.approx(row, rel=1e-3) for row in expected]
    assert {path.name for path in (run / "checkpoints").iterdir()} == {"step_0000004.pt", "step_0000008.pt"}


def test_its_backbone_is_evaluated(run: Path, photo_folder: Path, tmp_path: Path) -> None:
    usual = ["--gpu", "no", "--workers", "0", "--cache", str(tmp_path / "cache"), "--output", str(tmp_path / "eval")]
    flags = ["--data", str(photo_folder), "--leave-one-out", "--k", "1"]
    assert cocor.eval.cli.main(["knn", str(run), *usual, *flags]) == 0
    assert json.loads((tmp_path / "eval" / "knn.json").read_text())["result"][0]["k"] == 1


def test_its_metrics_are_plotted(run: Path, tmp_path: Path) -> None:
    assert cocor.monitor.plot.main([str(run), "--output", str(tmp_path / "p.png")]) == 0
    assert (tmp_path / "p.png").stat().st_size > 10_000


def test_its_options_are_all_known() -> None:
    saved = torch.load(OLD / "checkpoints" / "step_0000004.pt", weights_only=True)["config"]
    assert load(["--config", str(OLD / "config.yaml")]).to_dict().keys() >= saved.keys()
