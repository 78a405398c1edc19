"""Encoders of grey images with a mean and deviation of their own, from training to other programs."""

import json
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from helpers.runs import Capture, flags
from PIL import Image

from cocor.eval.cli import main as evaluate
from cocor.eval.export.command import main as export
from cocor.train import main
from cocor.weights.load import load_encoder
from loaders.channels import GREY_MEAN, GREY_STD, IMAGENET_MEAN, IMAGENET_STD
from loaders.prep.cli import main as prep

GREY = {"in_chans": 1, "mean": 0.4, "std": 0.3, "epochs": 1}


@pytest.fixture(scope="module")
def scans(photos: dict[str, Image.Image], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """root/{train,val}/CLASS/...: 8 and 4 grey images of 16 bits."""
    root = tmp_path_factory.mktemp("scans")
    for name, image in photos.items():
        for number, split in enumerate(("train", "train", "val")):
            part = image.convert("L").crop((60 * number, 40, 60 * number + 80, 100))
            (root / split / name).mkdir(parents=True, exist_ok=True)
            Image.fromarray(np.asarray(part).astype(np.uint16) * 257).save(root / split / name / f"{number}.png")
    return root


@pytest.fixture(scope="module")
def run(scans: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("runs") / "grey"
    assert main(flags(data=scans, loader="torch", output=output, **GREY)) == 0
    return output


def test_dali_trains_on_grey_images(scans: Path, tmp_path: Path) -> None:
    assert main(flags(data=scans / "train", loader="dali", output=tmp_path / "run", **GREY)) == 0
    assert load_encoder(tmp_path / "run").channels == 1


def test_its_views_are_shown_as_they_are(run: Path) -> None:
    tile = np.asarray(Image.open(run / "views.png"))[32:192, 8:168]
    assert (tile == tile[..., :1]).all() and tile.std() > 10


def test_evaluation_knows_the_channels(run: Path, scans: Path, tmp_path: Path) -> None:
    usual = ["--gpu", "no", "--workers", "0", "--cache", str(tmp_path / "cache")]
    for command, more in (("knn", ["--k", "1"]), ("consistency", [])):
        call = [command, str(run), "--data", str(scans), "--output", str(tmp_path), *usual, *more]
        assert evaluate(call) == 0
    assert json.loads((tmp_path / "knn.json").read_text())["result"][0]["k"] == 1
    assert json.loads((tmp_path / "knn.json").read_text())["mean"] == [0.4]
    assert evaluate([*call, "--mean", "0.5,0.5,0.5"]) == 2
    newest = load_encoder(next((run / "checkpoints").iterdir()))
    assert (newest.mean, newest.std) == (load_encoder(run).mean, load_encoder(run).std) == ((0.4,), (0.3,))


def test_timm_loads_it(run: Path, tmp_path: Path, capsys: Capture) -> None:
    encoder = load_encoder(run)
    assert export([str(run), "--to", "all", "--output", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert said.count("its models take colour images") + said.count("no test_resnet") >= 1 and "in_chans=1" in said
    model = timm.create_model(f"local-dir:{tmp_path}/grey", pretrained=True)
    images = torch.rand(2, 1, 32, 32)
    assert torch.equal(model.eval()(images), encoder.backbone(images))
    about = model.pretrained_cfg
    assert [about[key] for key in ("mean", "std", "input_size")] == [[0.4], [0.3], (1, 32, 32)]
    assert "Input: grey images of 32 x 32" in (tmp_path / "grey/README.md").read_text()
    again = load_encoder(tmp_path / "grey.safetensors")
    assert (again.digest, again.mean, again.std) == (encoder.digest, (0.4,), (0.3,))


def test_another_run_can_start_from_it(run: Path, scans: Path, tmp_path: Path, capsys: Capture) -> None:
    more = {"data": scans, "loader": "torch", "output": tmp_path / "run", "init": run}
    assert main(flags(**more, **GREY | {"mean": 0.5})) == 0
    assert "comes from images normalised by --mean 0.4 --std 0.3, which" in capsys.readouterr().err
    assert main(flags(**more | {"output": tmp_path / "other"})) == 2
    assert "do not fit --backbone test_resnet --stem imagenet --in-chans 3" in capsys.readouterr().err


def test_prep_measures_what_the_flags_take(scans: Path, tmp_path: Path, capsys: Capture) -> None:
    levels = np.stack([np.asarray(Image.open(file)) for file in (scans / "val").glob("*/*.png")]) / 65535
    assert prep(["info", str(scans / "val")]) == 0
    wanted = f"grey, --in-chans 1 --mean {levels.mean():.3f} --std {levels.std():.3f}, levels "
    assert wanted in capsys.readouterr().out
    (tmp_path / "plain").mkdir()
    Image.new("L", (40, 40), 201).save(tmp_path / "plain" / "1.png")
    assert prep(["info", str(tmp_path)]) == 0
    assert "--mean 0.788 --std 0.001, levels 201 to 201" in capsys.readouterr().out


def test_what_no_file_tells_is_imagenets(tmp_path: Path) -> None:
    for channels, usual in ((1, (GREY_MEAN, GREY_STD)), (3, (IMAGENET_MEAN, IMAGENET_STD))):
        model = timm.create_model("resnet18", num_classes=0, in_chans=channels)
        torch.save(model.state_dict(), tmp_path / "w.pth")
        found = load_encoder(tmp_path / "w.pth")
        assert (found.mean, found.std) == usual
    assert load_encoder(tmp_path / "w.pth", mean=[0.5], std=[0.1, 0.2, 0.3]).mean == (0.5, 0.5, 0.5)
