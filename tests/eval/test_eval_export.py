"""Exports load where they are meant to and give the same features; what cannot be exported is refused."""

import pickle
from pathlib import Path

import pytest
import timm
import torch
import torchvision

from cocor.backbone import build_backbone
from cocor.checkpoint import export_backbone
from cocor.eval.export import detectron2_name, export
from cocor.eval.export_cli import main
from cocor.weights.load import Encoder, load_encoder
from loaders.errors import UserError

Capsys = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    return load_encoder("random:resnet50")


def features(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(torch.rand(2, 3, 64, 64, generator=torch.Generator().manual_seed(5)))


def test_timm_and_torchvision_give_the_features(encoder: Encoder, tmp_path: Path) -> None:
    path = export(encoder, "timm", tmp_path / "a.safetensors")
    model = timm.create_model("resnet50", num_classes=0, checkpoint_path=str(path))
    assert torch.equal(features(model), features(encoder.backbone))
    model = torchvision.models.resnet50()
    state = torch.load(export(encoder, "torchvision", tmp_path / "a.pth"), weights_only=True)
    assert model.load_state_dict(state, strict=False).missing_keys == ["fc.weight", "fc.bias"]
    model.fc = torch.nn.Identity()  # type: ignore[assignment]
    assert torch.equal(features(model), features(encoder.backbone))
    assert load_encoder(path).digest == encoder.digest


def test_the_model_card_says_how_to_load(encoder: Encoder, tmp_path: Path) -> None:
    folder = export(encoder, "safetensors", tmp_path / "hub")
    assert {path.name for path in folder.iterdir()} == {"model.safetensors", "config.json", "README.md"}
    card = (folder / "README.md").read_text()
    code = (
        card.partition("```python\n")[2].partition("```")[0].replace("model.safetensors", f"{folder}/model.safetensors")
    )
    scope: dict = {}
    exec(code, scope)
    assert torch.equal(features(scope["model"]), features(encoder.backbone))


def test_detectron2_names(encoder: Encoder, tmp_path: Path) -> None:
    content = pickle.loads(export(encoder, "detectron2", tmp_path / "d.pkl").read_bytes())
    assert content["matching_heuristics"] is True
    model = content["model"]
    assert len(model) == 53 * 5  # convolutions, each with four tensors of its norm
    assert model["stem.conv1.weight"].shape == (64, 3, 7, 7) and model["res5.2.conv3.norm.running_var"].shape == (2048,)
    assert detectron2_name("layer2.0.downsample.1.bias") == "res3.0.shortcut.norm.bias"
    assert detectron2_name("bn1.weight") == "stem.conv1.norm.weight"
    assert detectron2_name("layer4.1.bn2.running_mean") == "res5.1.conv2.norm.running_mean"


def test_a_small_stem_is_kept_or_refused(tmp_path: Path) -> None:
    small = load_encoder("random:resnet18", stem="small")
    assert load_encoder(export(small, "timm", tmp_path / "s.safetensors")).stem == "small"
    export(small, "torchvision", tmp_path / "s.pth")
    with pytest.raises(UserError, match="detectron2"):
        export(small, "detectron2", tmp_path / "s.pkl")


def test_detectron2_has_no_other_resnets(tmp_path: Path) -> None:
    for name in ("seresnet50", "resnet50d", "resnet50_gn"):
        with pytest.raises(UserError, match="--to detectron2: its ResNets"):
            export(load_encoder(f"random:{name}"), "detectron2", tmp_path / "d.pkl")
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["levit_128s", "maxvit_rmlp_pico_rw_256"])
def test_fixed_size_models_are_exported(name: str, tmp_path: Path) -> None:
    """Neither takes images of another size, nor says so by an embedding of places."""
    trained = tmp_path / "backbone.safetensors"
    metadata = {"architecture": name, "stem": "imagenet", "image_size": 128}
    export_backbone(build_backbone(name, image_size=128), trained, metadata)
    for form, file in (("timm", "a.safetensors"), ("safetensors", "hub")):
        export(load_encoder(trained), form, tmp_path / file)  # type: ignore[arg-type]


def test_the_command(tmp_path: Path, capsys: Capsys) -> None:
    call = ["random:resnet18", "--to", "timm", "torchvision", "--output", str(tmp_path), "--name", "r"]
    assert main(call) == 0 and (tmp_path / "r.safetensors").is_file() and (tmp_path / "r.pth").is_file()
    assert main(call) == 2 and main([str(tmp_path / "none.pth")]) == 2 and main([]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 3 and "--force" in errors[0] and "no such file" in errors[1]
    every = ["--to", "timm", "safetensors", "detectron2", "--output", str(tmp_path / "all")]
    for flags, told in ((["--output", "/dev/null/exported"], "/dev/null is no folder; choose another --output"),
                        (every, "--to detectron2")):  # fmt: skip
        assert main(["random:resnet18", *flags]) == 2
        assert told in capsys.readouterr().err and not (tmp_path / "all").exists()
