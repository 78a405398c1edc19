"""What a frozen encoder keeps is told apart: all, nothing, or colour without orientation."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.linear_model import Ridge
from sklearn.metrics import r2_score
from torch import Tensor, nn

from cocor.eval.cli import main
from cocor.eval.features import Extraction
from cocor.eval.figures import draw_invariance
from cocor.eval.probes.invariance import HUES, LENGTHS, Invariance, InvariancePlan, invariance, r_squared, ridge
from cocor.weights.load import Encoder
from loaders.datasets.dataset import ImageDataset, open_folder
from loaders.views.ops import END, Op

HOW = Extraction(size=16, batch_size=64, workers=0)


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> ImageDataset:
    """120 pictures, red and brightest at the top: colour and orientation can be told from them."""
    folder = tmp_path_factory.mktemp("images")
    rng = np.random.default_rng(0)
    for number in range(120):
        pixels = rng.integers(0, 60, (16, 16, 3)) + np.linspace(120, 0, 16, dtype=int)[:, None, None]
        pixels[..., 0] += 75
        Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{number:03}.png")
    return open_folder(folder)


class Seeing(nn.Module):
    """An encoder that sees what ``see`` makes of images (B, 3, H, W)."""

    def __init__(self, see: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.see = see

    def forward(self, images: Tensor) -> Tensor:
        return self.see(images).flatten(1)


def look(see: Callable[[Tensor], Tensor], dataset: ImageDataset, seed: int = 0) -> Invariance:
    encoder = Encoder(Seeing(see), "seeing", "", "", "", 16, 0, 0, 0, "")
    return invariance(encoder, dataset, HOW, seed)


def means(images: Tensor) -> Tensor:
    return images.mean((2, 3))  # colour without place


def profile(images: Tensor) -> Tensor:
    grey = images.mean(1)  # place without colour
    return torch.cat([grey.mean(1), grey.mean(2)], dim=1)


def noise(images: Tensor) -> Tensor:
    return torch.randn(len(images), 8, generator=torch.Generator().manual_seed(len(images)))


def test_colour_orientation_and_nothing(images: ImageDataset, tmp_path: Path) -> None:
    colour, place, nothing = (look(see, images) for see in (means, profile, noise))
    assert colour.hue > 0.9 and colour.same_hue > 0.9 and colour.turn < 0.5
    assert place.turn > 0.9 and place.hue < 0.6 and place.same_hue < 0.6
    assert nothing.hue < 0.5 and nothing.turn < 0.55 and nothing.same_hue == pytest.approx(1 / HUES, abs=0.05)
    assert colour.r2["Brightness"] > 0.3 > 0.1 > nothing.mean_r2
    assert place.r2["TranslateY"] > colour.r2["TranslateY"] + 0.1
    assert colour.mean_r2 == pytest.approx(sum(colour.r2.values()) / 14) and colour.tested == 24
    assert look(means, images) == colour != look(means, images, seed=1)
    draw_invariance(tmp_path / "i.png", [colour, place, nothing])
    assert Image.open(tmp_path / "i.png").width > 1000


def test_ridge_equals_scikit_learn() -> None:
    generator = torch.Generator().manual_seed(0)
    inputs, noise = (torch.randn(50, n, generator=generator, dtype=torch.float64) for n in (5, 2))
    targets = 3 + inputs[:, :2] + noise
    mean_eigenvalue = (inputs - inputs.mean(0)).square().sum().item() / 5
    predicted = ridge(inputs, targets, 0.1)(inputs)
    reference = Ridge(alpha=0.1 * mean_eigenvalue).fit(inputs, targets).predict(inputs)
    assert predicted.numpy() == pytest.approx(reference)
    r2 = r2_score(targets, reference, multioutput="raw_values")
    assert r_squared(targets, predicted).numpy() == pytest.approx(r2)
    assert r_squared(torch.ones(4, 1), torch.zeros(4, 1)).item() == 0


def test_views_differ_in_what_is_measured_only() -> None:
    plan = InvariancePlan(16, shift=np.arange(6))
    drawn = plan.draw(0, np.arange(6), np.full((6, 2), (40, 30), np.int32))
    assert (drawn.boxes == [5, 0, 30, 30]).all() and not drawn.flips.any()
    assert drawn.composition.sum(-1).tolist() == [[length] * 6 for length in (*LENGTHS, 0)]
    assert (drawn.codes[:, -1] == [Op.HUE, END, END, END]).all()
    assert drawn.magnitudes[:, -1, 0].tolist() == pytest.approx([-1 / 2, -1 / 3, -1 / 6, 0, 1 / 6, 1 / 3])


def test_command_compares_encoders(images: ImageDataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = [
        "--data",
        str(images.root),
        "--image-size",
        "32",
        "--gpu",
        "no",
        "--workers",
        "0",
        "--output",
        str(tmp_path),
    ]
    command = ["invariance", "random:test_resnet", "random:test_resnet", *flags]
    assert main([*command, "--images", "60"]) == 0
    first, second = json.loads((tmp_path / "invariance.json").read_text())["result"]
    assert first["name"] != second["name"] and first["r2"] == second["r2"] and first["images"] == 60
    assert main([*command, "--images", "49"]) == 2
    assert "49 images: invariance learns from and is tested on 50 or more" in capsys.readouterr().err
