"""views.png shows the batch's own pixels in their places, whatever the batch holds."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from cocor.monitor.view_sheet import describe, save_view_sheet
from loaders.batch import Batch
from loaders.channels import IMAGENET_MEAN, IMAGENET_STD
from loaders.views.ops import BASIC, Op

IMAGENET = IMAGENET_MEAN, IMAGENET_STD
SIZE, TILE = 40, 160  # a 40-pixel image is shown four times as large


def normalised(levels: torch.Tensor) -> torch.Tensor:
    """uint8 levels (..., 3, H, W) as a loader delivers them."""
    mean, std = (torch.tensor(part).view(3, 1, 1) for part in (IMAGENET_MEAN, IMAGENET_STD))
    return (levels.float() / 255 - mean) / std


@pytest.fixture
def levels() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (5, 3, 3, SIZE, SIZE), generator=generator, dtype=torch.uint8)  # 5 views of 3 images


@pytest.fixture
def batch(levels: torch.Tensor) -> Batch:
    composition = torch.zeros(2, 3, len(BASIC), dtype=torch.uint8)
    composition[0, :, Op.ROTATE] = 1
    composition[1, :, Op.COLOR] = 2
    views = normalised(levels)
    return Batch(views[1:3], views[0], views[3:], composition, torch.tensor([4, -1, 0]), torch.arange(3))


def shown(path: Path, column: int, row: int, lines: int = 1) -> np.ndarray:
    """The pixels at a place of the sheet, at the batch's own size."""
    sheet = np.asarray(Image.open(path))
    left, top = 8 + column * (TILE + 8), 32 + row * (TILE + lines * 16 + 16)
    return sheet[top : top + TILE : 4, left : left + TILE : 4]


def test_views_stand_in_their_places(tmp_path: Path, batch: Batch, levels: torch.Tensor) -> None:
    save_view_sheet(batch, tmp_path / "views.png", *IMAGENET)
    for column in range(5):
        for row in range(3):
            expected = levels[column, row].permute(1, 2, 0).numpy()
            assert np.array_equal(shown(tmp_path / "views.png", column, row), expected)
    several = replace(batch, original=torch.cat([batch.original, -batch.original]))  # the first is shown
    save_view_sheet(several, tmp_path / "views.png", *IMAGENET, images=2)
    assert np.array_equal(shown(tmp_path / "views.png", 0, 1), levels[0, 1].permute(1, 2, 0).numpy())
    assert Image.open(tmp_path / "views.png").height == 32 + 2 * (TILE + 32)


def test_captions_are_drawn_and_long_ones_wrapped(tmp_path: Path, batch: Batch) -> None:
    assert describe(batch.composition[0, 0]) == "Rotate"
    assert describe(batch.composition[1, 0] + batch.composition[0, 0]) == "Color x2, Rotate"
    save_view_sheet(batch, tmp_path / "short.png", *IMAGENET)
    batch.composition.fill_(1)  # all fourteen at once
    save_view_sheet(batch, tmp_path / "long.png", *IMAGENET)
    short, long = (np.asarray(Image.open(tmp_path / name)) for name in ("short.png", "long.png"))
    assert long.shape[0] > short.shape[0] and long.shape[1] == short.shape[1]
    below = short[32 + TILE : 32 + TILE + 16]
    assert (below[:, 8 + 3 * (TILE + 8) :] < 128).any()


def test_a_batch_of_views_alone(tmp_path: Path, batch: Batch, levels: torch.Tensor) -> None:
    bare = replace(
        batch, original=batch.original[:0], composites=batch.composites[:0], composition=batch.composition[:0]
    )
    save_view_sheet(bare, tmp_path / "views.png", *IMAGENET)
    assert np.array_equal(shown(tmp_path / "views.png", 1, 2), levels[2, 2].permute(1, 2, 0).numpy())
    assert Image.open(tmp_path / "views.png").width == 8 + 2 * (TILE + 8)
