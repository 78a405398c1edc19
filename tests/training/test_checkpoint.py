"""Test that checkpoints are whole, safe and portable, and that exports load with timm's functions."""

import logging
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import timm
import torch
from helpers.hostile import few_more_files
from torch import nn

from cocor import checkpoint
from cocor.checkpoint import export_backbone
from cocor.config.options import Config
from loaders.errors import UserError
from loaders.files import TEMPORARY


def state(step: int) -> dict[str, Any]:
    return {"step": step, "epoch": 1, "training": {"method": {"backbone.w": torch.full((3,), float(step))}}}


def steps(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(
    ("keep", "milestones", "left"), [(2, 0, [15, 20]), (1, 10, [10, 20]), (1, 15, [15, 20])], ids=str
)
def test_the_newest_and_milestones_are_kept(tmp_path: Path, keep: int, milestones: int, left: list[int]) -> None:
    for step in (5, 10, 15, 20):
        checkpoint.save(tmp_path, state(step), keep=keep, milestones=milestones)
    assert steps(tmp_path) == [f"step_{step:07d}.pt" for step in left]
    found = checkpoint.newest(tmp_path)
    assert found is not None and found[1]["step"] == 20


def test_what_was_saved_comes_back_equal(tmp_path: Path) -> None:
    weight = torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last)
    content = {"step": 1, "a": [1, 2.5, "x", None, True], "b": {"w": weight, 3: torch.tensor(7, dtype=torch.bfloat16)}}
    loaded = checkpoint.load(checkpoint.save(tmp_path, content, keep=1))
    assert loaded["a"] == content["a"]
    assert torch.equal(loaded["b"]["w"], weight)
    assert loaded["b"]["w"].is_contiguous(memory_format=torch.channels_last)
    assert loaded["b"][3] == 7 and loaded["b"][3].dtype == torch.bfloat16
    path = checkpoint.save(tmp_path, {"step": 1, "view": torch.zeros(10**6)[:10]}, keep=1)
    assert path.stat().st_size < 10_000  # a view does not drag its memory along


def test_a_checkpoint_opens_without_cocor(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.randn(4, 2)).sum().backward()
    optimiser.step()
    training = {"method": model.state_dict(), "optimiser": optimiser.state_dict(), "rng": torch.get_rng_state()}
    content = {
        "step": 1,
        "training": training,
        **checkpoint.describe(Config(data=Path("x")), "digest", {}),
    }
    path = checkpoint.save(tmp_path, content, keep=1)
    code = (
        "import sys, torch; state = torch.load(sys.argv[1], weights_only=True); "
        "assert not any(name.startswith(('cocor', 'loaders')) for name in sys.modules); print(state['config']['lr'])"
    )
    run = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, cwd="/", check=False)
    assert run.stdout == "0.03\n", run.stderr


@pytest.mark.parametrize("stranger", [np.float64(1.0), np.zeros(2), Path("x"), Config(), {1, 2}])
def test_unsafe_objects_are_named_when_saved(tmp_path: Path, stranger: object) -> None:
    with pytest.raises(TypeError, match=r"checkpoint\.training\[1\]\.odd is a"):
        checkpoint.save(tmp_path, {"step": 1, "training": [0, {"odd": stranger}]}, keep=1)
    assert steps(tmp_path) == []


def test_a_damaged_newest_is_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for step in (1, 2, 3):
        path = checkpoint.save(tmp_path, state(step), keep=5)
    with few_more_files(0), pytest.raises(OSError, match="Too many open files"):
        checkpoint.newest(tmp_path)  # which is no damage
    path.write_bytes(path.read_bytes()[:-200])  # truncated
    second = tmp_path / "step_0000002.pt"
    content = bytearray(second.read_bytes())
    at = content.find(torch.full((3,), 2.0).numpy().tobytes())
    content[at + 5] ^= 1  # one flipped bit within a weight, which torch.load alone would not notice
    second.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        found = checkpoint.newest(tmp_path)
    assert found is not None and found[1]["step"] == 1
    assert "step_0000003.pt is damaged" in caplog.text and "step_0000002.pt is damaged" in caplog.text
    (tmp_path / "step_0000001.pt").write_bytes(b"damaged")
    with pytest.raises(UserError, match="none of its 3 checkpoints loads"):
        checkpoint.newest(tmp_path)


def test_saving_leaves_later_files_and_copies(tmp_path: Path) -> None:
    copies = ["step_best.pt", "step_0000001 (copy).pt"]
    for name in copies:
        checkpoint.save(tmp_path, state(1), keep=1).rename(tmp_path / name)
    assert checkpoint.newest(tmp_path) is None
    checkpoint.save(tmp_path, state(1), keep=1)
    (tmp_path / f".step_0000001.pt.123{TEMPORARY}").write_bytes(b"half, of a killed run")
    (tmp_path / "step_0000009.pt").write_bytes(b"damaged")
    checkpoint.save(tmp_path, state(2), keep=1)
    assert steps(tmp_path) == sorted([*copies, "step_0000002.pt", "step_0000009.pt"])


def test_resume_finds_what_it_is_asked_for(tmp_path: Path) -> None:
    run, folder = tmp_path / "run", tmp_path / "run" / checkpoint.FOLDER
    assert checkpoint.find("auto", run) is None
    for step in (1, 2):
        checkpoint.save(folder, state(step), keep=5)
    first, second = sorted(folder.iterdir())
    other = tmp_path / "other"
    for resume, output in (("auto", run), (str(second), run), (str(run), other), (str(folder), other)):
        found = checkpoint.find(resume, output)
        assert found is not None and found[0] == second
    found = checkpoint.find(str(first), other)
    assert found is not None and found[0] == first
    with pytest.raises(UserError, match=r"step_0000002.pt is later"):
        checkpoint.find(str(first), run)
    with pytest.raises(UserError, match="no such checkpoint"):
        checkpoint.find(str(tmp_path / "x.pt"), run)
    with pytest.raises(UserError, match="no checkpoints there"):
        checkpoint.find(str(tmp_path), run)
    with pytest.raises(UserError, match=r"run: is a folder; name a file, such as a run's backbone"):
        checkpoint.load(run)


def test_differences_are_listed_with_both_values() -> None:
    config = Config(data=Path("a"), lr=0.1)
    files = {"kind": "folder", "lengths": "l", "times": "t"}
    saved = checkpoint.describe(config, "abc", files)
    assert checkpoint.compare(saved, config, "abc", files) == []
    moved = replace(config, data=Path("b"), workers=7, resume="auto", gpus=2)
    assert checkpoint.compare(saved, moved, "abc", files) == []
    changed = replace(config, lr=0.2, lengths=(1,), batch_size=512)
    assert checkpoint.compare(saved, replace(config, force_data=True), "xyz", {}) == []
    assert checkpoint.compare(saved, changed, "xyz", files) == [
        "batch_size: 256 in the checkpoint, 512 now",
        "lr: 0.1 in the checkpoint, 0.2 now",
        "lengths: [1, 2, 3] in the checkpoint, [1] now",
        "data: other images: other names, labels, classes or sizes in pixels (digest abc in the checkpoint, xyz now); "
        "--force-data goes on with them",
    ]


def test_a_checkpoint_from_before_an_option() -> None:
    config = Config(mmnn_shape="concave", mmnn_optimiser="sgd")
    saved = checkpoint.describe(config, "abc", {})
    for key in ("mmnn_shape", "mmnn_optimiser", "symmetric", "projector_layers"):
        del saved["config"][key]
    assert checkpoint.compare(saved, config, "abc", {}) == []
    (difference,) = checkpoint.compare(saved, replace(config, mmnn_shape="monotone"), "abc", {})
    assert difference == "mmnn_shape: concave in the checkpoint, monotone now"


def small_stem() -> nn.Module:
    model: Any = timm.create_model("resnet18", num_classes=0)
    model.conv1, model.maxpool = nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.Identity()
    return model


def test_the_export_is_what_timm_loads(tmp_path: Path) -> None:
    model = timm.create_model("resnet18", num_classes=0).to(memory_format=torch.channels_last).eval()
    path = tmp_path / "backbone.safetensors"
    export_backbone(torch.compile(model), path, {"architecture": "resnet18", "stem": "imagenet", "step": 7})  # type: ignore[arg-type]
    images = torch.randn(2, 3, 64, 64)
    again = timm.create_model("resnet18", num_classes=0, checkpoint_path=str(path)).eval()
    with torch.no_grad():
        torch.testing.assert_close(again(images), model(images), rtol=1e-5, atol=1e-5)
    overlay = {"file": str(path), "num_classes": 0}
    assert timm.create_model("resnet18", pretrained=True, num_classes=10, pretrained_cfg_overlay=overlay)
    with safetensors.safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt", "architecture": "resnet18", "stem": "imagenet", "step": "7"}
    assert steps(tmp_path) == ["backbone.safetensors"]
    model, again = small_stem(), small_stem()
    export_backbone(model, path, {})
    timm.models.load_checkpoint(again, str(path))
    assert all(torch.equal(value, again.state_dict()[key]) for key, value in model.state_dict().items())
