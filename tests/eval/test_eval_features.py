"""Features come out right, whole and the same again; making them changes nothing in the encoder."""

import os
from contextlib import closing
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import v2

from cocor.distributed.collectives import World
from cocor.eval.crops import CropPlan
from cocor.eval.datasets.protocols import SgdSettings
from cocor.eval.features import Extraction, features_of, summary
from cocor.eval.probes.sgd import RandomCrops
from cocor.weights.load import Encoder, digest, load_encoder
from loaders.channels import IMAGENET_MEAN, IMAGENET_STD
from loaders.datasets.dataset import open_folder
from loaders.errors import UserError
from loaders.open import open_loader
from loaders.views.order import BatchOrder

HOW = Extraction(size=64, batch_size=7, workers=0)


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    return load_encoder("random:resnet18")


def transcribed(path: str) -> torch.Tensor:
    """Resize(64, bicubic), CenterCrop(64), normalised, by Pillow and torchvision."""
    image = Image.open(path).convert("RGB")
    side = min(image.size)
    left, top = (image.width - side) // 2, (image.height - side) // 2
    square = image.resize((64, 64), Image.Resampling.BICUBIC, box=(left, top, left + side, top + side))
    pixels = v2.functional.to_dtype(v2.functional.to_image(square), torch.float32, scale=True)
    return v2.functional.normalize(pixels, list(IMAGENET_MEAN), list(IMAGENET_STD))


def test_features_equal_a_transcription(encoder: Encoder, photo_folder: Path) -> None:
    dataset = open_folder(photo_folder)
    encoder.backbone.train()  # a careless caller
    before = digest(encoder.backbone)
    found = features_of(encoder, dataset, HOW)
    assert digest(encoder.backbone) == before and encoder.backbone.training
    encoder.backbone.eval()
    for at in (0, 8, 23):
        image = transcribed(dataset.paths[at])
        torch.testing.assert_close(found.values[at], encoder.backbone(image[None])[0], rtol=1e-3, atol=1e-4)
    assert found.labels.tolist() == dataset.labels.tolist()
    assert summary(found)["classes"] == 4


def test_the_cache_and_its_key(encoder: Encoder, photo_folder: Path, tmp_path: Path) -> None:
    dataset = open_folder(photo_folder).subset([0, 9, 17])
    how = replace(HOW, cache=tmp_path)
    first = features_of(encoder, dataset, how)
    (file,) = tmp_path.iterdir()
    stamp = file.stat().st_mtime_ns
    assert torch.equal(features_of(encoder, dataset, how).values, first.values) and file.stat().st_mtime_ns == stamp
    other = load_encoder("random:resnet34")
    keys = {how.key(encoder, dataset), how.key(encoder, dataset.subset([0, 1])), how.key(other, dataset)}
    for other_how in (replace(how, crop="ten"), replace(how, size=32), replace(how, filter="bilinear")):
        keys.add(other_how.key(encoder, dataset))
    assert len(keys) == 6
    file.write_bytes(b"half")
    assert torch.equal(features_of(encoder, dataset, how).values, first.values)


def test_the_cache_notices_exchanged_images(encoder: Encoder, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache = tmp_path / "cache"
    file = tmp_path / "images" / "a" / "0.bmp"
    file.parent.mkdir(parents=True)
    seen = []
    for number, colour in enumerate(("red", "blue")):
        Image.new("RGB", (40, 30), colour).save(file)
        os.utime(file, ns=(1, 1 + number))
        seen.append(features_of(encoder, open_folder(tmp_path / "images"), replace(HOW, cache=cache)).values)
    assert not torch.equal(*seen) and len(list(cache.iterdir())) == 2
    found = features_of(encoder, open_folder(tmp_path / "images"), replace(HOW, cache=file))  # which is no folder
    assert len(found) == 1 and "features are not kept, and will be made again next time; --cache" in caplog.text


def test_infinite_features_are_named_not_cached(encoder: Encoder, photo_folder: Path, tmp_path: Path) -> None:
    broken = replace(encoder, backbone=torch.nn.Sequential(Poisoned(), encoder.backbone))
    with pytest.raises(UserError, match=r"photos: features of 1 of 24 images \(first: number 20\) are not finite"):
        features_of(broken, open_folder(photo_folder), replace(HOW, cache=tmp_path), "photos")
    assert not list(tmp_path.iterdir())


class Poisoned(torch.nn.Module):
    """Makes the last image of every third batch of 7 no number."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls == 4:  # the first asks for the width
            images = images.clone()
            images[-1] = torch.nan
        return images


@pytest.mark.parametrize(("recipe", "encoded", "step"), [(10, 5, 10), (8, 8, 8), (8, 100, 8), (100, 7, 21)])
def test_sgd_step_ignores_the_encoding_batch(
    encoder: Encoder, photo_folder: Path, recipe: int, encoded: int, step: int
) -> None:
    settings, how = SgdSettings(lr=1.0, batch_size=recipe, epochs=1), replace(HOW, size=32, batch_size=encoded)
    with closing(RandomCrops(encoder, open_folder(photo_folder), settings, how)) as views:
        assert views.batch == step
        assert [len(labels) for _, labels in views.epoch(0)] == [step] * (24 // step)


def test_ten_crops_are_torchvisions(encoder: Encoder) -> None:
    """Boxes in the source image are TenCrop(224)'s in the resized one, to the rounding of one pixel."""
    plan = CropPlan(size=224, crop="ten")
    ramp = torch.arange(256 * 341).view(1, 256, 341)
    crops = v2.TenCrop(224)(ramp)
    planned = plan.draw(0, np.array([0]), np.array([[256, 341]], np.int32))
    for box, flip, crop in zip(planned.boxes[0], planned.flips[0], crops, strict=True):
        top, left, height, width = (int(v) for v in box)
        mine = ramp[:, top : top + height, left : left + width]
        mine = mine.flip(2) if flip else mine
        assert mine.shape == crop.shape and (mine - crop).abs().max() <= 1


def test_ten_crop_features_have_ten_rows(encoder: Encoder, photo_folder: Path) -> None:
    dataset = open_folder(photo_folder).subset([3, 4])
    found = features_of(encoder, dataset, replace(HOW, crop="ten"))
    assert found.values.shape == (2, 10, 512)
    assert found.flat().values.shape == (20, 512) and found.flat().labels.tolist() == [0] * 20
    assert not torch.equal(found.values[0, 0], found.values[0, 5])


def test_constant_features_are_said(encoder: Encoder, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for i in range(3):
        (tmp_path / "a").mkdir(exist_ok=True)
        Image.new("RGB", (40, 40), "grey").save(tmp_path / "a" / f"{i}.png")
    features_of(encoder, open_folder(tmp_path), HOW)
    assert "collapsed" in caplog.text


def test_both_loaders_use_the_filter(photo_folder: Path) -> None:
    """DALI's antialiased cubic is Pillow's; the two filters differ by more than the two decoders."""
    dataset = open_folder(photo_folder).subset([0, 7, 20])
    seen = {}
    for name, filter in product(("torch", "dali"), ("bilinear", "bicubic")):
        order = BatchOrder(3, 3, shuffle=False, drop_last=False)
        with closing(open_loader(name, dataset, CropPlan(size=64, filter=filter), order, workers=0)) as loader:
            seen[name, filter] = next(loader.epoch(0)).original.clone()
    torch.testing.assert_close(seen["torch", "bicubic"][0], transcribed(dataset.paths[0]))

    def distance(one: torch.Tensor, other: torch.Tensor) -> float:
        return (one - other).abs().mean().item()

    apart = distance(seen["torch", "bilinear"], seen["torch", "bicubic"])
    for filter in ("bilinear", "bicubic"):
        assert distance(seen["torch", filter], seen["dali", filter]) < 0.3 * apart


@pytest.mark.gpu
def test_a_gpu_gives_the_same_features(encoder: Encoder, photo_folder: Path) -> None:
    dataset = open_folder(photo_folder)
    here = features_of(encoder, dataset, HOW)
    device = torch.device("cuda", 0)
    for loader in ("torch", "dali"):
        there = features_of(encoder, dataset, replace(HOW, world=World(0, 0, 1, device), loader=loader, workers=2))
        similarity = torch.nn.functional.cosine_similarity(here.values, there.values)
        assert similarity.min() > 0.99 and there.values.device.type == "cpu"
    encoder.backbone.cpu()
