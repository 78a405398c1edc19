"""Fine-tuning trains the whole network on the labels that it is given, and resumes to the same result."""

import json
from pathlib import Path

import pytest
import torch

from cocor import checkpoint
from cocor.eval.cli import main
from cocor.eval.datasets.splits import Splits, open_splits
from cocor.eval.features import Extraction
from cocor.eval.probes.finetune import FinetuneResult, FinetuneSettings, finetune
from cocor.weights.load import digest, load_encoder
from loaders.channels import IMAGENET_MEAN
from loaders.errors import UserError

HOW = Extraction(size=32, batch_size=4, workers=0)


@pytest.fixture(scope="module")
def splits(photo_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Splits:
    """24 photographs of four classes, which train, validate and test."""
    root = tmp_path_factory.mktemp("data") / "photos"
    root.mkdir()
    for part in ("train", "test"):
        (root / part).symlink_to(photo_folder)
    return open_splits(root)


def tuned(
    splits: Splits, folder: Path, resume: bool = False, mean: tuple[float, ...] = IMAGENET_MEAN, **settings: float
) -> FinetuneResult:  # fmt: skip
    chosen = {"fraction": 1.0, "epochs": 2, "lr": 0.1, "head_lr": 0.1, "seed": 0} | settings
    encoder = load_encoder("random:test_resnet", mean=mean)
    before = encoder.digest
    result = finetune(encoder, splits, FinetuneSettings(**chosen), HOW, folder, resume)
    assert digest(encoder.backbone) == before  # a copy is trained
    return result


def network(folder: Path) -> dict[str, torch.Tensor]:
    found = checkpoint.newest(folder)
    assert found is not None
    return found[1]["model"]


def test_the_whole_network_learns(splits: Splits, tmp_path: Path) -> None:
    result = tuned(splits, tmp_path, epochs=12, lr=1.0, head_lr=1.0)
    assert result.top1 > 0.5 and result.top5 is None
    assert (result.train, result.test, result.classes, result.batch_size) == (24, 24, 4, 4)
    start = load_encoder("random:test_resnet").backbone.state_dict()
    assert all(not torch.equal(network(tmp_path)[f"0.{name}"], value)
               for name, value in start.items() if name.endswith("weight"))  # fmt: skip


def test_a_share_of_every_class_is_learned_from(splits: Splits, tmp_path: Path) -> None:
    assert tuned(splits, tmp_path, fraction=0.01).train == 4
    assert tuned(splits, tmp_path, fraction=0.5).train == 12


def test_rates_of_backbone_and_head_differ(splits: Splits, tmp_path: Path) -> None:
    tuned(splits, tmp_path, lr=1e-12)
    start = load_encoder("random:test_resnet").backbone.conv1[0].weight
    assert torch.allclose(network(tmp_path)["0.conv1.0.weight"], start)
    assert network(tmp_path)["1.weight"].abs().max() > 1e-3


def test_resumes_to_the_same_result(splits: Splits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cocor.eval.probes.finetune._SAVE_SECONDS", 0.0)
    whole, save = tuned(splits, tmp_path / "whole", epochs=3), checkpoint.save

    def stop(folder: Path, state: dict, **options: int) -> None:
        save(folder, state, **options)
        if state["step"] == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint, "save", stop)
    with pytest.raises(KeyboardInterrupt):
        tuned(splits, tmp_path / "parts", epochs=3)
    monkeypatch.setattr(checkpoint, "save", save)
    resumed = tuned(splits, tmp_path / "parts", epochs=3, resume=True)
    assert (resumed.top1, resumed.train_loss) == (whole.top1, whole.train_loss)
    first, second = network(tmp_path / "whole"), network(tmp_path / "parts")
    assert all(torch.equal(first[name], second[name]) for name in first)
    with pytest.raises(UserError, match="differs in lr; leave --resume out"):
        tuned(splits, tmp_path / "parts", epochs=3, lr=0.2, resume=True)
    with pytest.raises(UserError, match="differs in mean; leave --resume out"):
        tuned(splits, tmp_path / "parts", epochs=3, mean=(0.5,), resume=True)


def test_command_reports_every_fraction(splits: Splits, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--data", str(splits.test.root.parent), "--image-size", "32", "--gpu", "no", "--workers", "0"]
    command = ["finetune", "random:test_resnet", *flags, "--output", str(tmp_path), "--epochs", "1"]
    assert main([*command, "--label-fraction", "1", "0.2"]) == 0
    found = json.loads((tmp_path / "finetune.json").read_text())["result"]
    assert [one["fraction"] for one in found] == [1.0, 0.2]
    assert main([*command, "--label-fraction", "1.5"]) == 2
    assert main([*command, "--label-fraction", "1", "--epochs", "3", "--lr", "1e30"]) == 2
    assert "lower --lr (1e+30)" in capsys.readouterr().err
