"""Weights of every origin give the same features; half-fitting or unsafe files are refused in one line."""

import argparse
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import timm
import torch
import torchvision
from torch import Tensor, nn

from cocor import checkpoint
from cocor.backbone import build_backbone
from cocor.checkpoint import export_backbone
from cocor.methods.moco import MoCo
from cocor.weights.load import digest, load_encoder
from loaders.channels import IMAGENET_MEAN
from loaders.errors import UserError

State = dict[str, Tensor]


@pytest.fixture(scope="module")
def reference() -> nn.Module:
    torch.manual_seed(3)
    return build_backbone("resnet18").eval()


def prefixed(state: State, prefix: str) -> State:
    return {prefix + name: value for name, value in state.items()}


def numbered(state: State) -> State:
    """lightly: Sequential(*children)."""
    place = {"conv1": 0, "bn1": 1, "layer1": 4, "layer2": 5, "layer3": 6, "layer4": 7}
    return {f"{place[k.partition('.')[0]]}.{k.partition('.')[2]}": v for k, v in state.items()}


def saved(state: Any, folder: Path) -> Path:
    torch.save(state, folder / "saved.pth")
    return folder / "saved.pth"


HEAD: State = {"fc.weight": torch.zeros(10, 512), "fc.bias": torch.zeros(10)}
NOISE = torch.randn(5, generator=torch.Generator().manual_seed(0))


def other(state: State) -> State:
    return {name: value + 1 if value.is_floating_point() else value for name, value in state.items()}


def pair(state: State, online: str, average: str) -> State:
    return prefixed(state, online) | prefixed(other(state), average)


LAYOUTS = {
    "timm": lambda s: s,
    "torchvision": lambda s: s | HEAD,
    "timm-checkpoint": lambda s: {"arch": "resnet18", "state_dict": s | HEAD, "epoch": 3},
    "moco": lambda s: {"arch": "resnet18", "state_dict": prefixed(HEAD, "module.encoder_q.")
                       | pair(s, "module.encoder_q.", "module.encoder_k.") | {"module.queue": NOISE}},
    "simsiam": lambda s: {"state_dict": prefixed(s | {"fc.0.weight": NOISE}, "module.encoder.")
                          | {"module.predictor.0.weight": NOISE}},
    "supcon": lambda s: {"opt": argparse.Namespace(lr=0.5), "model": {"head.0.weight": NOISE} | {
        k.replace("downsample", "shortcut"): v for k, v in prefixed(s, "encoder.module.").items()}},
    "byol": lambda s: pair(s, "online_encoder.net.", "target_encoder.net.") | {"online_predictor.net.0.weight": NOISE},
    "solo-learn": lambda s: {"hyper_parameters": {"lr": 0.3}, "state_dict": {"projector.0.w": NOISE}
                             | pair(s, "backbone.", "momentum_backbone.")},
    "lightly": lambda s: {"state_dict": prefixed(numbered(s), "backbone.") | {"projection_head.0.weight": NOISE}},
    "augself": lambda s: {"backbone": s, "projector": {"0.weight": NOISE}},
    "compiled": lambda s: prefixed(s, "_orig_mod.module."),
    "sharded": lambda s: {k.replace("layer1.0.", "layer1.0._checkpoint_wrapped_module."): v
                          for k, v in prefixed(s, "_fsdp_wrapped_module.").items()},
    "submodule": lambda s: prefixed(s, "my_submodule."),
    "numpy": lambda s: {k: v.numpy() for k, v in s.items()},
    "moco-in-a-module": lambda s: {"state_dict": pair(s, "model.encoder_q.", "model.encoder_k.")
                                   | {"loss.weight": NOISE}},
    "solo-learn-in-a-module": lambda s: pair(s, "learner.backbone.", "learner.momentum_backbone."),
    "byol-in-a-module": lambda s: prefixed(s, "learner.net.")
    | pair(s, "learner.online_encoder.net.", "learner.target_encoder.net."),
    "byol-of-two-dicts": lambda s: {
        "online_network_state_dict": prefixed(numbered(s), "encoder.") | {"projetion.net.0.weight": NOISE},
        "target_network_state_dict": prefixed(other(numbered(s)), "encoder."), "optimizer_state_dict": {"state": {}}},
    "openselfsup-moco": lambda s: pair(s, "encoder_q.0.", "encoder_k.0."),
    "openselfsup-byol": lambda s: pair(s, "online_net.0.", "target_net.module.0."),
}  # fmt: skip
AVERAGED = ("moco", "byol", "solo-learn", "moco-in-a-module", "solo-learn-in-a-module", "byol-in-a-module",
            "byol-of-two-dicts", "openselfsup-moco", "openselfsup-byol")  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_same_encoder(layout: str, reference: nn.Module, tmp_path: Path) -> None:
    file = saved(LAYOUTS[layout](dict(reference.state_dict())), tmp_path)
    encoder = load_encoder(file)
    assert encoder.architecture == "resnet18" and encoder.matched == encoder.total == 120
    assert encoder.digest == digest(reference)
    assert not any(part.training for part in encoder.backbone.modules())
    if layout in AVERAGED:
        average = load_encoder(file, which="ema")
        torch.testing.assert_close(average.backbone.conv1.weight, reference.conv1.weight + 1)  # type: ignore[union-attr]


def test_a_missing_moving_average_is_refused(reference: nn.Module, tmp_path: Path) -> None:
    state, file = dict(reference.state_dict()), tmp_path / "weights.pth"
    for layout in ("timm", "torchvision", "timm-checkpoint", "simsiam", "lightly", "compiled"):
        torch.save(LAYOUTS[layout](state), file)
        with pytest.raises(UserError, match="no moving average"):
            load_encoder(file, which="ema")
    with pytest.raises(UserError, match="no moving average"):
        load_encoder("random:resnet18", which="ema")
    for prefix in ("", "module.", "backbone."):  # timm's training script and others keep it beside
        torch.save({"state_dict": state, "state_dict_ema": prefixed(other(state), prefix)}, file)
        average = load_encoder(file, which="ema").backbone
        assert torch.equal(average.conv1.weight, reference.conv1.weight + 1)  # type: ignore[arg-type, operator, union-attr]


def test_own_weights_load_with_their_stem(tmp_path: Path) -> None:
    backbone, other_backbone = build_backbone("resnet18", "small"), build_backbone("resnet18", "small")
    method = MoCo(backbone, queue_size=16)
    about = {"config": {"backbone": "resnet18", "stem": "small"}}
    checkpoint.save(tmp_path / "checkpoints", {"step": 7, "training": {"method": method.state_dict()}, **about}, keep=1)
    encoder = load_encoder(tmp_path)
    assert encoder.digest == digest(backbone) and encoder.stem == "small"
    assert load_encoder(tmp_path, which="ema").digest == digest(method.key_backbone)
    state = {"step": 12, "training": {"method": MoCo(other_backbone, queue_size=16).state_dict()}, **about}
    checkpoint.save(tmp_path / "checkpoints", state, keep=2)
    (tmp_path / "checkpoints" / "step_best.pt").write_text("")  # of a user
    assert load_encoder(tmp_path).digest == digest(other_backbone)
    export_backbone(backbone, tmp_path / "backbone.safetensors", {"architecture": "resnet18", "stem": "small"})
    assert load_encoder(tmp_path).digest == digest(backbone)


@pytest.mark.parametrize("name", ["resnet18", "resnet34", "resnet50", "wide_resnet50_2"])
def test_architectures_are_seen_from_shapes(name: str, tmp_path: Path) -> None:
    safetensors.torch.save_file(getattr(torchvision.models, name)().state_dict(), tmp_path / "w.safetensors")
    assert load_encoder(tmp_path / "w.safetensors").architecture == name


UNKNOWN = ("model.backbone.", "resnet.", "encoder.backbone.", "student.encoder.", "lit.net.1.")


@pytest.mark.parametrize("prefix", UNKNOWN)
def test_a_unique_unknown_prefix_is_taken(prefix: str, reference: nn.Module, tmp_path: Path) -> None:
    state = dict(reference.state_dict())
    encoder = load_encoder(saved({"state_dict": prefixed(state | HEAD, prefix) | {"model.0.weight": NOISE}}, tmp_path))
    assert encoder.digest == digest(reference)
    assert f"layout of timm or torchvision, below {prefix!r}; 120 of 120 tensors" in encoder.describe()
    assert load_encoder(saved(prefixed(numbered(state), prefix), tmp_path)).digest == digest(reference)


def test_two_unknown_encoders_are_refused(reference: nn.Module, tmp_path: Path) -> None:
    state, file = dict(reference.state_dict()), tmp_path / "w.pth"
    torch.save(prefixed(state, "student.net.") | prefixed(other(state), "teacher.net."), file)
    with pytest.raises(UserError, match=r"below 'student.net.' and 'teacher.net.'; save one of them to a file"):
        load_encoder(file)
    three = prefixed(state, "a.encoder_q.") | prefixed(other(state), "a.encoder_k.") | prefixed(HEAD, "a.x.")
    torch.save(three | prefixed(other(other(state)), "a.third."), file)  # a known pair, and another
    with pytest.raises(UserError, match=r"lie below 'a.third.' and 'a.encoder_k.' and 'a.encoder_q.'"):
        load_encoder(file)
    torch.save(prefixed(state, "trunk.") | prefixed(state, "whole.trunk."), file)  # one encoder under two names
    assert load_encoder(file).digest == digest(reference)
    torch.save(prefixed(state, "target_encoder.net."), file)
    with pytest.raises(UserError, match=r"moving average of one, below 'target_encoder.net.'; use --which ema"):
        load_encoder(file)
    with pytest.raises(UserError, match="no moving average"):
        load_encoder(saved(prefixed(state, "resnet."), tmp_path), which="ema")


def test_an_encoder_has_the_name_of_its_file(reference: nn.Module, tmp_path: Path) -> None:
    names = {"r50.pth.tar": "r50", "check_0050.pt": "check_0050", "v1.2.tar": "v1.2", "a.b.ckpt": "a.b"}
    for file, name in names.items():
        torch.save(dict(reference.state_dict()), tmp_path / file)
        assert load_encoder(tmp_path / file).name == name


def test_transformers_load_by_name(tmp_path: Path) -> None:
    model = timm.create_model("vit_tiny_patch16_224", num_classes=0)
    state = prefixed(model.state_dict(), "module.backbone.")
    torch.save({"student": other(state), "teacher": state, "epoch": 3}, tmp_path / "vit.pth")
    with pytest.raises(UserError, match="--backbone"):
        load_encoder(tmp_path / "vit.pth")
    options = {"architecture": "vit_tiny_patch16_224"}
    assert load_encoder(tmp_path / "vit.pth", which="ema", **options).digest == digest(model)  # type: ignore[arg-type]
    unknown = prefixed(model.state_dict(), "model.trunk.") | {"model.0.weight": NOISE}
    assert load_encoder(saved(unknown, tmp_path), **options).digest == digest(model)  # type: ignore[arg-type]


def test_depthwise_layers_do_not_look_grey(tmp_path: Path) -> None:
    for channels in (3, 1):  # whose crpe1.conv_list.0.weight has one channel either way
        state = timm.create_model("coat_lite_tiny", num_classes=0, in_chans=channels).state_dict()
        found = load_encoder(saved(prefixed(state, "backbone."), tmp_path), architecture="coat_lite_tiny")
        assert found.channels == channels


@pytest.mark.parametrize("mean", [(0.5, 0.4, 0.3), "imagenet", "(0.5,)", [123.7, 116.3, 103.5], [0.5], [None] * 3, 0.5])
def test_only_a_mean_of_pixels_is_believed(mean: Any, reference: nn.Module, tmp_path: Path) -> None:
    config = {"backbone": "resnet18", "mean": mean}
    found = load_encoder(saved({"config": config, "state_dict": reference.state_dict()}, tmp_path))
    assert found.mean == (mean if isinstance(mean, tuple) else IMAGENET_MEAN)


def test_fixed_size_models_get_their_size() -> None:
    sizes = {name: load_encoder(f"random:{name}").image_size for name in ("vit_tiny_patch16_384", "test_resnet")}
    assert sizes == {"vit_tiny_patch16_384": 384, "test_resnet": 224}


@pytest.mark.parametrize(("prefix", "below"), [("", ""), ("my.net.", " below 'my.net.'")])
def test_partial_fits_are_refused_with_counts(prefix: str, below: str, reference: nn.Module, tmp_path: Path) -> None:
    state = dict(reference.state_dict())
    del state["layer4.1.conv2.weight"]
    message = rf"119 of the 120 .* match{below}; missing: 1 \(layer4.1.conv2.weight\).*--backbone or --stem"
    with pytest.raises(UserError, match=message):
        load_encoder(saved(prefixed(state, prefix), tmp_path))
    larger = prefixed(dict(timm.create_model("resnet34").state_dict()), prefix)
    with pytest.raises(UserError, match="left over"):
        load_encoder(saved(larger, tmp_path), architecture="resnet18")


def test_wrong_shapes_and_nan_weights_are_named(reference: nn.Module, tmp_path: Path) -> None:
    state = dict(reference.state_dict())
    shape = r"of another shape: 1 \(conv1.weight\), \(64, 3, 9, 9\) instead of \(64, 3, 7, 7\)"
    for change, message in (
        ({"conv1.weight": torch.zeros(64, 3, 9, 9)}, shape),
        ({"layer1.0.bn1.weight": torch.full((64,), torch.nan)}, r"1 \(layer1.0.bn1.weight\) of its weights are not f"),
    ):
        with pytest.raises(UserError, match=message):
            load_encoder(saved(state | change, tmp_path))


class Own(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)


class Harmful:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return print, ("code ran",)


def test_objects_beside_the_weights(reference: nn.Module, tmp_path: Path) -> None:
    """numpy's random state, paths, and objects of a package that is not installed."""
    package = types.ModuleType("mmengine")

    class HistoryBuffer:
        pass

    HistoryBuffer.__module__, HistoryBuffer.__qualname__ = "mmengine", "HistoryBuffer"
    package.HistoryBuffer = HistoryBuffer  # type: ignore[attr-defined]
    beside = {"rng": np.random.get_state(), "path": tmp_path, "seen": {1}, "history": np.zeros(3),
              "best": np.float64(3)}  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "mmengine", package)
        torch.save({"state_dict": dict(reference.state_dict()), "hub": HistoryBuffer(), **beside}, tmp_path / "w.pth")
    assert load_encoder(tmp_path / "w.pth").digest == digest(reference)
    assert "mmengine" not in sys.modules


def test_unsafe_and_foreign_files_are_refused(
    reference: nn.Module, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = dict(reference.state_dict())
    for content, message in (
        (torchvision.models.resnet18(), r"weights_only=False\)\.state_dict\(\), NEW"),
        ({"state_dict": state, "x": Harmful()}, "run code"),
        ({"model": Own()}, r"\['state_dict'\], NEW\), or where that is a module, its \.state_dict\(\)$"),
    ):
        with pytest.raises(UserError, match=message):
            load_encoder(saved(content, tmp_path))
    assert "code ran" not in capsys.readouterr().out
    (tmp_path / "text.pth").write_text("hello")
    (tmp_path / "page.pth").write_text("<!DOCTYPE html>")
    (tmp_path / "file.yaml").write_text("# made by hand\nlr: 0.1\n")
    for suffix in ("pth", "safetensors"):
        (tmp_path / f"lfs.{suffix}").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:12\n")
    torch.save({"head.weight": NOISE}, tmp_path / "head.pth")
    for name, message in [("text.pth", "damaged"), ("none.pth", "no such file"), ("head.pth", "no encoder"),
                          ("page.pth", "torch.save did not write it$"), ("file.yaml", "torch.save did not write it$"),
                          ("lfs.pth", "run git lfs pull"), ("lfs.safetensors", "run git lfs pull")]:  # fmt: skip
        with pytest.raises(UserError, match=message) as caught:
            load_encoder(tmp_path / name)
        assert "\n" not in str(caught.value)
