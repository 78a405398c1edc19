"""A .beton file is a data set like a folder: for the torch and DALI loaders too, and damage in it is named."""

import itertools
import pickle
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.loading import OpenLoader, opening
from helpers.prep_cases import CORNERS, corner_colours, good_cases, write_all
from PIL import Image

from loaders.batch import Loader
from loaders.channels import IMAGENET_MEAN, IMAGENET_STD
from loaders.datasets.dataset import open_folder
from loaders.datasets.stored import StoredDataset, open_stored
from loaders.errors import UserError
from loaders.open import open_images
from loaders.prep.convert import Target, convert
from loaders.prep.encode import Settings
from loaders.prep.sources import open_source
from loaders.views.plan import ViewPlan

SIZE = 32
PLAN = ViewPlan(size=SIZE, seed=3)
LOADERS = ("torch", "dali")
COLOURS = np.array(list(CORNERS.values()), np.float64)


@pytest.fixture
def make(photo_beton: Path) -> Iterator[OpenLoader]:
    stored = open_stored(photo_beton)
    yield from opening(stored, stored, PLAN)


def images_of(loader: Loader) -> torch.Tensor:
    """The originals of an epoch in the data set's order, as 0..255 values (N, 3, H, W)."""
    std, mean = (torch.tensor(values).view(3, 1, 1) for values in (IMAGENET_STD, IMAGENET_MEAN))
    batches = list(loader.epoch(0))
    loader.close()
    order = torch.cat([batch.index for batch in batches]).argsort()
    return (torch.cat([batch.original for batch in batches]) * std + mean)[order] * 255


def damage(path: Path, images: StoredDataset, index: int, to: Path) -> Path:
    """A copy of the file in which a stretch in the middle of one image is overwritten."""
    shutil.copyfile(path, to)
    place, length = int(images.file.beton.table["data_ptr"][index]), int(images.file.beton.sizes_in_bytes[index])
    with to.open("r+b") as file:
        file.seek(place + length // 2)
        file.write(b"\xff\xd9" + bytes(40))
    return to


@pytest.mark.parametrize("name", LOADERS)
def test_loaders_show_it_as_they_show_the_folder(
    photo_folder: Path, photo_beton: Path, name: str, make: OpenLoader
) -> None:
    plan = ViewPlan(size=SIZE, seed=3, contrastive=(), lengths=())
    left, right = (images_of(make(name, images, plan=plan)) for images in (open_folder(photo_folder), None))
    kept = [i for i in range(24) if i % 6 != 5]
    assert torch.equal(left[kept], right[kept])  # the same bytes
    assert (left - right).abs().mean() < 1


FORMS = {
    "folder": None,
    "prepared folder": ("x", Settings()),
    "resized folder": ("x", Settings(40)),
    "file": ("x.beton", Settings()),
    "resized file": ("x.beton", Settings(40)),
    "raw file": ("x.beton", Settings(raw=True)),
}


@pytest.mark.parametrize(("loader", "form"), [
    *itertools.product(LOADERS, FORMS),
    *(pytest.param("ffcv", form, marks=pytest.mark.ffcv) for form in FORMS if "file" in form),
])  # fmt: skip
def test_oddities_keep_colours_and_orientation(tmp_path: Path, loader: str, make: OpenLoader, form: str) -> None:
    """CMYK, PNG named JPEG, all eight EXIF orientations and more, through every loader from every form."""
    source, made = tmp_path / "source", FORMS[form]
    write_all(source / "odd", good_cases())
    if made is not None:
        name, settings = made
        target: Target = "beton" if name.endswith(".beton") else "folder"
        convert(open_source(source), tmp_path / name, target, settings, workers=1)
    images = open_images(source if made is None else tmp_path / made[0])
    plan = ViewPlan(size=40, contrastive=(), original="center", lengths=())
    assert len(images) == len(good_cases())
    for name, image in zip(images.names, images_of(make(loader, images, plan=plan, drop_last=False)), strict=True):
        picture = Image.fromarray(image.permute(1, 2, 0).round().clip(0, 255).byte().numpy())
        assert np.abs(corner_colours(picture) - COLOURS).max() < 12, name


def test_worker_processes_open_it_themselves(make: OpenLoader, photo_beton: Path) -> None:
    assert len(pickle.dumps(open_stored(photo_beton).image(3))) < 500
    for left, right in zip(*(make("torch", workers=workers).epoch(0) for workers in (0, 2)), strict=True):
        assert torch.equal(left.views, right.views)


def test_classes_and_labels_from_elsewhere(photo_beton: Path, tmp_path: Path) -> None:
    stored = open_stored(photo_beton)
    more = open_stored(photo_beton, classes=["aardvark", *stored.classes])
    assert (more.labels == stored.labels + 1).all() and more.classes[0] == "aardvark"
    with pytest.raises(UserError, match=r"photos.beton: class rocket is not among the 3 known classes"):
        open_stored(photo_beton, classes=stored.classes[:3])
    (tmp_path / "labels.csv").write_text("\n".join(f"{name},{i % 2}" for i, name in enumerate(stored.names)))
    assert open_images(photo_beton, tmp_path / "labels.csv").labels.tolist() == [0, 1] * 12
    (tmp_path / "labels.csv").write_text(f"{stored.names[0]},0\n")
    with pytest.raises(UserError, match=r"photos.beton: .*: no label in .*labels.csv"):
        open_images(photo_beton, tmp_path / "labels.csv")


@pytest.mark.parametrize("name", LOADERS)
def test_a_damaged_image_is_named_and_left_out(photo_beton: Path, tmp_path: Path, name: str, make: OpenLoader) -> None:
    stored = open_stored(damage(photo_beton, open_stored(photo_beton), 8, tmp_path / "x.beton"))
    loader = make(name, stored)
    for _ in range(2):
        with pytest.raises(UserError, match=r"x.beton: chelsea/2.jpg \(image 8\) is damaged") as error:
            list(loader.epoch(0))
        assert "\n" not in str(error.value)
    assert len(list(make(name, stored.subset([*range(8), *range(9, 24)]), drop_last=False).epoch(0))) == 3


def test_a_file_that_was_replaced_is_opened_anew(photo_folder: Path, photo_beton: Path, tmp_path: Path) -> None:
    shutil.copyfile(photo_beton, tmp_path / "x.beton")
    first = open_stored(tmp_path / "x.beton")
    convert(open_source(photo_folder), tmp_path / "new.beton", "beton", Settings(64), workers=1)
    (tmp_path / "new.beton").replace(tmp_path / "x.beton")
    second = open_stored(tmp_path / "x.beton")
    assert first.digest != second.digest and second.sizes.min() <= 64
