"""Exports load where they are meant to and give the same features; what cannot be exported is refused."""

import json
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import runs

from cocor.backbone import build_backbone, fixed_size
from cocor.checkpoint import export_backbone
from cocor.eval.export.card import model_card
from cocor.eval.export.command import main
from cocor.eval.export.detectron2 import detectron2_name
from cocor.eval.export.formats import FORMATS, export
from cocor.train import main as train
from cocor.weights.load import Encoder, load_encoder
from loaders.channels import IMAGENET_MEAN
from loaders.errors import UserError

Capsys = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    return load_encoder("random:resnet50")


def features(model: torch.nn.Module, side: int = 64) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(torch.rand(2, 3, side, side, generator=torch.Generator().manual_seed(5)))


def loaded(lines: str) -> torch.nn.Module:
    scope: dict = {}
    exec(lines, scope)
    return scope["model"]


@pytest.mark.parametrize(
    ("form", "architecture", "stem"),
    [("timm", "resnet18", "imagenet"), ("torchvision", "resnet18", "imagenet"), ("hub", "resnet18", "imagenet"),
     ("timm", "resnet18", "small"), ("torchvision", "resnet18", "small"), ("hub", "resnet18", "small"),
     ("timm", "test_vit", "small"), ("hub", "test_vit", "small")],
)  # fmt: skip
def test_the_printed_lines_load_it(form: Any, architecture: str, stem: str, tmp_path: Path) -> None:
    encoder = load_encoder(f"random:{architecture}", stem=stem)
    path = export(encoder, form, tmp_path / f"a{FORMATS[form].suffix}")
    side = fixed_size(encoder.backbone) or 64
    model = loaded(FORMATS[form].lines(encoder, path))
    assert torch.equal(features(model, side), features(encoder.backbone, side))
    if form != "torchvision":
        assert (again := load_encoder(path)).digest == encoder.digest and again.stem == stem


def test_onnx_gives_the_features_for_any_batch(tmp_path: Path) -> None:
    encoder = load_encoder("random:test_resnet")
    path = export(encoder, "onnx", tmp_path / "a.onnx")
    for count in (1, 5):
        images = torch.rand(count, 3, 224, 224)
        scope: dict = {"images": images.numpy()}
        exec(FORMATS["onnx"].lines(encoder, path), scope)
        assert scope["features"] == pytest.approx(encoder.backbone(images).numpy(), rel=1e-4, abs=1e-4)
    assert scope["about"]["mean"] == list(IMAGENET_MEAN) and scope["about"]["image_size"] == 224


class TestTheModelCard:
    def test_it_says_how_to_load(self, encoder: Encoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        folder = export(encoder, "hub", tmp_path / "hub")
        assert {path.name for path in folder.iterdir()} == {"model.safetensors", "config.json", "README.md"}
        config = json.loads((folder / "config.json").read_text())
        assert config["pretrained_cfg"]["license"] is None and config["pretrained_cfg"]["mean"] == list(IMAGENET_MEAN)
        card = (folder / "README.md").read_text()
        monkeypatch.chdir(folder)
        model = loaded(card.partition("```python\n")[2].partition("```")[0])
        assert torch.equal(features(model), features(encoder.backbone)) and "Not known here: the weights" in card

    def test_it_is_filled_from_the_run(self, photo_folder: Path, tmp_path: Path) -> None:
        run = tmp_path / "run"
        options = {"loader": "torch", "data": photo_folder, "val_data": photo_folder, "probe_every": 2}
        assert train(runs.flags(**options, output=run, seed=7)) == 0
        card = model_card(load_encoder(run))
        (accuracy,) = (record["accuracy"] for record in runs.metrics(run, "probe") if record["epoch"] == 2)
        for words in (": 24 images in 4 classes, 8 of them with labels", "| moco + CoCor (", "| 2 of 2 |",
                      "| seed | 7 |", "| 30.00%, by the MMNN alone |", f"| 2 | {accuracy:.1%} |"):  # fmt: skip
            assert words in card
        assert str(tmp_path) not in card and str(photo_folder) not in card
        first = model_card(load_encoder(run / "checkpoints" / f"step_{runs.STEPS:07d}.pt"))
        assert "| 1 of 2 |" in first and "| 2 |" not in first


def test_detectron2_names(encoder: Encoder, tmp_path: Path) -> None:
    content = pickle.loads(export(encoder, "detectron2", tmp_path / "d.pkl").read_bytes())
    assert content["matching_heuristics"] is True
    model = content["model"]
    assert len(model) == 53 * 5  # convolutions, each with four tensors of its norm
    assert model["stem.conv1.weight"].shape == (64, 3, 7, 7) and model["res5.2.conv3.norm.running_var"].shape == (2048,)
    assert detectron2_name("layer2.0.downsample.1.bias") == "res3.0.shortcut.norm.bias"
    assert detectron2_name("bn1.weight") == "stem.conv1.norm.weight"
    assert detectron2_name("layer4.1.bn2.running_mean") == "res5.1.conv2.norm.running_mean"


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
    for form, file in (("timm", "a.safetensors"), ("hub", "hub")):
        export(load_encoder(trained), form, tmp_path / file)  # type: ignore[arg-type]


def test_the_command(tmp_path: Path, capsys: Capsys) -> None:
    call = ["random:resnet18", "--to", "timm", "torchvision", "--output", str(tmp_path), "--name", "r"]
    assert main(call) == 0 and (tmp_path / "r.safetensors").is_file() and (tmp_path / "r.pth").is_file()
    assert main(call) == 2 and main([str(tmp_path / "none.pth")]) == 2 and main([]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 3 and "--force" in errors[0] and "no such file" in errors[1]
    assert main(["random:resnet18", "--output", "/dev/null/exported"]) == 2
    assert "/dev/null is no folder; choose another --output" in capsys.readouterr().err


def test_what_cannot_be_written_is_named(tmp_path: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    call = ["random:resnet18", "--stem", "small", "--name", "r", "--output"]
    assert main([*call, str(tmp_path / "some"), "--to", "detectron2", "safetensors"]) == 2
    said = capsys.readouterr()
    assert "--to detectron2: its ResNets" in said.err and "timm cannot build the small stem" in said.out
    assert {path.name for path in (tmp_path / "some").iterdir()} == {"r"}
    monkeypatch.setitem(sys.modules, "onnxscript", None)  # as if it were not installed
    assert main([*call, str(tmp_path / "all"), "--to", "all"]) == 0
    said = capsys.readouterr()
    assert "not written: --to onnx: needs onnxscript: pip install onnxscript\n" in said.out and not said.err
    assert {path.name for path in (tmp_path / "all").iterdir()} == {"r", "r.pth", "r.safetensors"}


def test_pushing_needs_a_login_and_the_hub(tmp_path: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "none"))
    for variable in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(variable, raising=False)
    for name, words in (("a/b/c", "--push a/b/c: Repo id must"), ("me/r", "no login at the Hugging Face Hub; run: ")):
        assert main(["random:resnet18", "--push", name, "--output", str(tmp_path / "out")]) == 2
        assert words in capsys.readouterr().err and not (tmp_path / "out").exists()
    monkeypatch.setenv("HF_TOKEN", "none")
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")  # where nobody listens
    assert main(["random:test_resnet", "--push", "me/r", "--name", "r", "--output", str(tmp_path / "out")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"push it by: hf upload me/r {tmp_path / 'out' / 'r'}" in line and (tmp_path / "out/r/README.md").is_file()
