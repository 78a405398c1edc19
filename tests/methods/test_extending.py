"""Test a method and a pool that a user's program adds, as whole runs."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import runs
from helpers.runs import Capture
from torch import Tensor, nn

from cocor import checkpoint
from cocor.auxiliary import AUXILIARIES
from cocor.auxiliary.base import Auxiliary
from cocor.config.checks import warnings
from cocor.config.options import Config
from cocor.config.resolve import load, read
from cocor.data import training_plan
from cocor.methods import METHODS, Spec, method_class, spec
from cocor.methods.base import Method, Ranks, feature_size, normalised
from cocor.monitor import profile
from cocor.train import main
from loaders.batch import Batch
from loaders.errors import UserError
from loaders.views.ops import BASIC, POOLS, Op


class Align(Method):
    """Views of an image attract each other, embeddings repel their mean."""

    defaults = {"lr": 0.01, "embedding_dim": 16, "constants": (0.9, 0.8)}
    options = ("embedding_dim",)
    cost = 6

    def __init__(self, backbone: nn.Module, ranks: Ranks, embedding_dim: int) -> None:
        super().__init__(backbone, ranks)
        self.head = nn.Linear(feature_size(backbone), embedding_dim)

    @classmethod
    def check(cls, config: Config, ranks: int) -> None:
        if config.embedding_dim % 2:
            raise UserError("embedding_dim: must be even for Align")

    def loss_of(self, views: Tensor, labels: Tensor | None) -> tuple[Tensor, Tensor]:
        first, second = (self.encode(images) for images in views)
        return first.mean(0).square().sum() - (first * second).sum(1).mean(), first

    def encode(self, images: Tensor) -> Tensor:
        return normalised(self.head(self.backbone(images)))


class Norm(Auxiliary):
    """Features of contrastive views are to have length 1, after a learned scale."""

    defaults = {"auxiliary_weight": 0.5}
    options = ("auxiliary_weight",)

    def __init__(self, config: Config, method: Method) -> None:
        super().__init__(config, method)
        self.scale = nn.Parameter(torch.ones(()))

    @classmethod
    def cost(cls, config: Config) -> float:
        return 7.0

    def loss(self, method: Method, batch: Batch, features: Sequence[Tensor]) -> Tensor:
        return (self.scale * torch.cat([*features]).norm(dim=1) - 1).square().mean()


@pytest.fixture(autouse=True)
def added(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METHODS, "align", Align)
    monkeypatch.setitem(AUXILIARIES, "norm", Norm)
    monkeypatch.setitem(POOLS, "turns", (Op.ROTATE, Op.SHEAR_X))
    monkeypatch.setattr(profile, "STEPS", 2)


def flags(**options: Any) -> list[str]:
    """Two epochs of two steps."""
    return runs.flags(**{"batch_size": 12, "knn_every": 0, "loader": "torch", "hypergradient": "taylor"} | options)


@pytest.mark.parametrize("options", [{"method": "align"}, {"pool": "turns"}, {"auxiliary": "norm"}], ids=str)
def test_a_run_profiles_and_resumes(options: dict, photo_folder: Path, tmp_path: Path, capsys: Capture) -> None:
    options = {"data": str(photo_folder)} | options | ({"hypergradient": "exact"} if "auxiliary" in options else {})
    assert main(flags(output=tmp_path / "profiled", profile=True, **options)) == 0
    cost = 6 if "method" in options else 7 if "auxiliary" in options else 4
    assert f"{cost}.00" in capsys.readouterr().out
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert main(flags(output=whole, **options)) == 0
    shutil.copytree(whole, broken)
    (broken / "checkpoints" / "step_0000004.pt").unlink()
    assert main([*flags(output=broken, **options), "--resume"]) == 0
    states = [checkpoint.load(run / "checkpoints" / "step_0000004.pt")["training"] for run in (whole, broken)]
    runs.assert_same_bits(*states)
    assert load(["--config", str(whole / "config.yaml")]).to_dict().items() >= options.items()


def test_a_method_owns_its_options() -> None:
    config = load(["--method", "align"])
    assert (config.lr, config.embedding_dim, config.constants) == (0.01, 16, (0.9, 0.8))
    given = ["--method", "align", "--embedding-dim", "8", "--queue-size", "512"]
    assert warnings(*read(given)) == ["--queue-size has no effect: it acts only with --method moco"]
    with pytest.raises(UserError, match="must be even for Align"):
        load(["--method", "align", "--embedding-dim", "9"])
    with pytest.raises(UserError, match="method unknown: unknown here; there are moco,"):
        method_class("unknown")
    with pytest.raises(UserError, match=r"one of moco, .*, align; did you mean align"):
        load(["--method", "aling"])


@pytest.mark.parametrize("method", METHODS)
def test_declarations_are_read_from_the_source(method: str) -> None:
    read, made = spec(method), method_class(method)
    assert read == Spec(made.__name__, made.defaults, made.options, made.needs_labels)
    assert {*read.defaults, *read.options} <= Config.__dataclass_fields__.keys()


def test_help_shows_a_method(capsys: Capture) -> None:
    with pytest.raises(SystemExit):
        load(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "byol: 256; intl: 8192;" in text and "align: 16)" in text and "VICReg, Align: dimension" in text


def test_views_are_drawn_from_a_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = training_plan(load(["--pool", "turns"]))
    used = plan.draw(0, np.arange(100), np.full((100, 2), 64, np.int32)).composition.sum((0, 1)) > 0
    assert [op for op in BASIC if used[op]] == [Op.ROTATE, Op.SHEAR_X]
    for mistaken in ((Op.HUE,), ()):
        monkeypatch.setitem(POOLS, "mistaken", mistaken)
        with pytest.raises(UserError, match="pool mistaken: unknown, empty, or not of basic augmentations only"):
            training_plan(load(["--pool", "mistaken"]))
