"""Consistency is measured on the right pairs, leaves no trace, and finds the order that it should find."""

from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import nn

from cocor import checkpoint
from cocor.config.resolve import resolve
from cocor.distributed.collectives import World
from cocor.eval.features import Extraction
from cocor.eval.figures import draw_consistency
from cocor.eval.probes.consistency import LENGTHS, measure, subject, target_rises
from cocor.models import build_method
from cocor.objective.mmnn import MMNN
from cocor.weights.load import digest
from loaders.datasets.dataset import open_folder
from loaders.errors import UserError

CPU = torch.device("cpu")
HOW = Extraction(size=32, batch_size=8, workers=0)


@pytest.fixture(scope="module", params=["monotone", "concave", "before shapes existed"])
def run(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """A run's folder with a checkpoint of an untrained MoCo and a fitted MMNN."""
    folder = tmp_path_factory.mktemp("runs") / "moco"
    config = resolve(
        {"backbone": "test_resnet", "stem": "imagenet", "queue_size": 64, "batch_size": 32, "key_bn_splits": 1}
    )
    method = build_method(config, World(0, 0, 1, CPU))
    shape = "monotone" if request.param == "monotone" else "concave"
    mmnn = MMNN({1: 0.8, 2: 0.75, 3: 0.65}, shape)
    settings = config.to_dict() | {"mmnn_shape": shape}
    if request.param == "before shapes existed":
        del settings["mmnn_shape"]
    state = {"step": 3, "training": {"method": method.state_dict(), "mmnn": mmnn.state_dict()}}
    checkpoint.save(folder / "checkpoints", {**state, "config": settings}, keep=1)
    return folder


def test_own_checkpoints_are_seen_behind_heads(run: Path, photo_folder: Path, tmp_path: Path) -> None:
    dataset = open_folder(photo_folder).subset(range(0, 24, 2))
    trained, bare = subject(run, CPU), subject("random:test_resnet", CPU)
    before = digest(trained.module)
    results = measure([trained, bare], dataset, HOW)
    assert digest(trained.module) == before
    first, second = results
    assert (first.space, second.space) == ("embeddings", "backbone features")
    assert (first.targets, second.targets) == ("its MMNN", "the MMNN of moco")
    assert tuple(first.similarity) == LENGTHS and first.images == 12
    assert first.target[1] == pytest.approx(0.8, abs=0.01) and first.target[3] == pytest.approx(0.65, abs=0.01)
    assert (first.target_rises, first.rises >= 0) == (0, True) and first.target_checks > 100
    assert first.similarity[1] > first.similarity[10]  # even an untrained network sees strong changes
    if "Identity" in first.by_op:
        assert first.by_op["Identity"] == pytest.approx(1.0, abs=1e-4)
    assert asdict(measure([trained], dataset, HOW)[0]) == asdict(first)  # the same views every time
    draw_consistency(tmp_path / "c.png", results)
    assert Image.open(tmp_path / "c.png").width > 1000
    assert any("DACL" in line for line in first.lines())


def test_flags_are_obeyed_or_refused(run: Path, photo_folder: Path) -> None:
    dataset = open_folder(photo_folder).subset(range(4))
    with pytest.raises(UserError, match="--which ema"):
        subject(run, CPU, which="ema")
    with pytest.raises(UserError, match="--std: 2 values for 3 channels"):
        subject(run, CPU, std=(0.2, 0.2))
    given = subject(run, CPU, mean=(0.5,))
    assert (given.mean, given.std) == ((0.5,) * 3, subject(run, CPU).std)
    exact, rounded = (
        measure([subject(run, CPU)], dataset, replace(HOW, precision=precision))[0].similarity[2]
        for precision in (torch.float32, torch.bfloat16)
    )
    assert exact != rounded and rounded == pytest.approx(exact, abs=0.02)


class Rising(nn.Module):
    def forward(self, composition: torch.Tensor) -> torch.Tensor:
        return composition[..., 0].float() - composition[..., 1:].sum(-1).float()


def test_violations_of_monotonicity_are_counted() -> None:
    composition = torch.eye(14, dtype=torch.uint8)
    assert target_rises(MMNN({1: 0.8, 2: 0.75, 3: 0.65}), composition) == (0, 14 * 14)
    assert target_rises(Rising(), composition) == (14, 14 * 14)
