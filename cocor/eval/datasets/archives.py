"""Read the data sets' own formats: from the folder that an archive unpacks to, to names, classes and splits.

Every reader takes the folder that holds the marker file and returns a :class:`Listed`: which files, of which class, and
which of them are for training, validation (where the authors fixed it) and testing. Nothing is decoded here.
"""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cocor.eval.datasets import cifar
from loaders.errors import UserError

Rows = list[tuple[str, int]]  # (file relative to the root, class)


@dataclass(frozen=True)
class Listed:
    """``splits``: rows of "train", "test" and, where the authors fixed it, "val"; rows of "all" if they fixed none."""

    root: Path
    classes: list[str]
    splits: dict[str, Rows]


def _lines(path: Path) -> list[str]:
    try:
        return [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; unpack the data set's archive again") from None


def _mat(path: Path) -> dict[str, Any]:
    try:
        from scipy.io import loadmat
    except ImportError:
        raise UserError(f"{path}: reading it needs scipy: pip install scipy") from None
    try:
        return dict(loadmat(str(path), squeeze_me=True))
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or 'missing'}; unpack the data set's archive again") from None
    except Exception as error:  # scipy raises many kinds on foreign files
        raise UserError(f"{path}: not readable as a MATLAB file ({error})") from None


def _number(classes: Iterable[str]) -> dict[str, int]:
    return {name: place for place, name in enumerate(classes)}


def read_cifar(name: str) -> Callable[[Path, Path], Listed]:
    """Return the reader of "cifar10" or "cifar100", whose pickled batches are unpacked into ``cache``."""

    def read(base: Path, cache: Path) -> Listed:
        root, labels, classes = cifar.unpack(name, base, cache)
        rows = {s: [(f"{s}/{i:05d}.png", label) for i, label in enumerate(found)] for s, found in labels.items()}
        return Listed(root, classes, rows)

    return read


def read_cub200(base: Path, cache: Path) -> Listed:
    """Read ``images.txt``, ``image_class_labels.txt`` (from 1), ``train_test_split.txt`` (1: training), all by id."""
    tables = [dict(line.split(maxsplit=1) for line in _lines(base / f"{name}.txt"))
              for name in ("images", "image_class_labels", "train_test_split")]  # fmt: skip
    images, labels, training = tables
    classes = [line.split(maxsplit=1)[1] for line in _lines(base / "classes.txt")]
    splits: dict[str, Rows] = {"train": [], "test": []}
    for key, name in images.items():
        splits["train" if training[key] == "1" else "test"].append((f"images/{name}", int(labels[key]) - 1))
    return Listed(base, classes, splits)


def read_caltech101(base: Path, cache: Path) -> Listed:
    """Read class folders; the background class is none (as in torchvision)."""
    root = base / "101_ObjectCategories"
    classes = sorted(p.name for p in root.iterdir() if p.is_dir() and p.name != "BACKGROUND_Google")
    rows = [
        (f"{name}/{file.name}", label)
        for label, name in enumerate(classes)
        for file in sorted((root / name).iterdir())
        if file.suffix.lower() == ".jpg"
    ]
    return Listed(root, classes, {"all": rows})


def read_sun397(base: Path, cache: Path) -> Listed:
    """Read ``ClassName.txt`` ("/a/abbey") and the authors' first partition, beside the images or one folder up."""
    classes = _lines(base / "ClassName.txt")
    places = _number(classes)
    images = base / "SUN397" if (base / "SUN397" / "a").is_dir() else base
    around = [base, base / "Partitions", base.parent, base.parent / "Partitions"]
    splits: dict[str, Rows] = {}
    for split, file in (("train", "Training_01.txt"), ("test", "Testing_01.txt")):
        folder = next((place for place in around if (place / file).is_file()), None)
        if folder is None:
            raise UserError(f"{base / file}: missing; unpack the authors' Partitions.zip there")
        splits[split] = [(name[1:], places[name.rpartition("/")[0]]) for name in _lines(folder / file)]
    return Listed(images, classes, splits)


def read_food101(base: Path, cache: Path) -> Listed:
    """Read ``meta/classes.txt`` and, for each split, JSON with the names of every class's images."""
    classes = _lines(base / "meta" / "classes.txt")
    splits: dict[str, Rows] = {}
    for split in ("train", "test"):
        found = json.loads("\n".join(_lines(base / "meta" / f"{split}.json")))
        splits[split] = [(f"{name}.jpg", label) for label, c in enumerate(classes) for name in found[c]]
    return Listed(base / "images", classes, splits)


def read_flowers102(base: Path, cache: Path) -> Listed:
    """Read ``imagelabels.mat`` (from 1) and ``setid.mat`` (numbers of images, from 1)."""
    labels = [int(label) - 1 for label in _mat(base / "imagelabels.mat")["labels"]]
    sets = _mat(base / "setid.mat")
    splits = {
        split: [(f"jpg/image_{int(number):05d}.jpg", labels[int(number) - 1]) for number in sets[key]]
        for split, key in (("train", "trnid"), ("val", "valid"), ("test", "tstid"))
    }
    return Listed(base, [str(number) for number in range(1, max(labels) + 2)], splits)


def read_pets(base: Path, cache: Path) -> Listed:
    """Read lines ``Abyssinian_100 1 1 1``: name, class (from 1), species, breed."""
    classes: dict[int, str] = {}
    splits: dict[str, Rows] = {}
    for split, file in (("train", "trainval.txt"), ("test", "test.txt")):
        fields = [line.split() for line in _lines(base / "annotations" / file) if not line.startswith("#")]
        splits[split] = [(f"images/{name}.jpg", int(label) - 1) for name, label, *_ in fields]
        classes |= {int(label) - 1: name.rpartition("_")[0] for name, label, *_ in fields}
    return Listed(base, [classes[place] for place in sorted(classes)], splits)


def read_aircraft(base: Path, cache: Path) -> Listed:
    """Read lines ``1025794 707-320``: image and variant."""
    data = base / "data"
    found = {
        split: [line.split(maxsplit=1) for line in _lines(data / f"images_variant_{split}.txt")]
        for split in ("train", "val", "test")
    }
    known = data / "variants.txt"
    classes = _lines(known) if known.is_file() else sorted({variant for _, variant in found["train"]})
    places = _number(classes)
    splits = {split: [(f"images/{name}.jpg", places[v]) for name, v in rows] for split, rows in found.items()}
    return Listed(data, classes, splits)


def read_cars(base: Path, cache: Path) -> Listed:
    """Read the devkit's ``annotations`` (``fname``, ``class`` from 1); the test set's have lain in two places."""
    tests = [base / "cars_test_annos_withlabels.mat", base / "devkit" / "cars_test_annos_withlabels.mat"]
    files = {
        "train": base / "devkit" / "cars_train_annos.mat",
        "test": next((file for file in tests if file.is_file()), tests[0]),
    }
    splits = {
        split: [(f"cars_{split}/{row['fname']}", int(row["class"]) - 1) for row in _mat(file)["annotations"]]
        for split, file in files.items()
    }
    return Listed(base, [str(name) for name in _mat(base / "devkit" / "cars_meta.mat")["class_names"]], splits)


@dataclass(frozen=True)
class Archive:
    """Where a data set lies: ``marker`` is a file (or with a slash a folder) in its folder, which is the root itself or
    one of ``folders``."""

    marker: str
    folders: tuple[str, ...]
    read: Callable[[Path, Path], Listed]

    def find(self, root: Path, name: str) -> Path | None:
        """Find the folder with the marker below ``root`` or ``root``/``name``, or None."""
        below = ("", *self.folders)
        places = [root / folder for folder in (*below, *(f"{name}/{folder}" for folder in below))]
        return next((place for place in places if self._is_at(place)), None)

    def _is_at(self, place: Path) -> bool:
        marker = place / self.marker
        return marker.is_dir() if self.marker.endswith("/") else marker.is_file()


ARCHIVES: dict[str, Archive] = {
    "cifar10": Archive("data_batch_1", ("cifar-10-batches-py",), read_cifar("cifar10")),
    "cifar100": Archive("train", ("cifar-100-python",), read_cifar("cifar100")),
    "cub200": Archive("train_test_split.txt", ("CUB_200_2011",), read_cub200),
    "caltech101": Archive("101_ObjectCategories/", ("caltech101", "caltech-101"), read_caltech101),
    "sun397": Archive("ClassName.txt", ("SUN397",), read_sun397),
    "food101": Archive("meta/classes.txt", ("food-101",), read_food101),
    "flowers102": Archive("setid.mat", ("flowers-102",), read_flowers102),
    "pets": Archive("annotations/trainval.txt", ("oxford-iiit-pet",), read_pets),
    "aircraft": Archive("data/images_variant_train.txt", ("fgvc-aircraft-2013b",), read_aircraft),
    "cars": Archive("devkit/cars_train_annos.mat", ("stanford_cars",), read_cars),
}
