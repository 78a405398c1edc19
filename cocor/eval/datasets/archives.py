"""Read the data sets' own formats: unpacked archives -> names, classes, splits.

Every reader takes the folder that holds the marker file and returns a :data:`Listed`. Images are not decoded here, but
CIFAR's pickled ones are unpacked, once and losslessly, into a folder of PNGs that every loader reads.
"""

import hashlib
import json
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from loaders.errors import UserError
from loaders.prep.output import staged
from loaders.progress import track

Rows = list[tuple[str, str]]  # (file relative to the root, class)
# Root of the files, classes, and rows of "train", "test" and, where the authors fixed it, "val"; of "all" if they fixed
# none.
Listed = tuple[Path, list[str], dict[str, Rows]]

_CIFAR = {  # batches of each split; file and key of the classes
    "cifar10": ({"train": [f"data_batch_{i}" for i in range(1, 6)], "test": ["test_batch"]},
                "batches.meta", "label_names"),
    "cifar100": ({"train": ["train"], "test": ["test"]}, "meta", "fine_label_names"),
}  # fmt: skip
_HARMLESS = {("numpy.core.multiarray", "_reconstruct"), ("numpy._core.multiarray", "_reconstruct"),
             ("numpy", "ndarray"), ("numpy", "dtype"), ("_codecs", "encode")}  # fmt: skip


def _lines(path: Path) -> list[str]:
    return [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def _mat(path: Path) -> dict[str, Any]:
    try:
        from scipy.io import loadmat
    except ImportError:
        raise UserError(f"{path}: reading it needs scipy: pip install scipy") from None
    return dict(loadmat(str(path), squeeze_me=True))


class _Unpickler(pickle.Unpickler):
    """Make numpy arrays and plain containers only: the pickles come from the network."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _HARMLESS:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no CIFAR batch holds")
        return super().find_class(module, name)


def _unpickle(file: Path) -> dict[str, Any]:
    with file.open("rb") as stream:
        return dict(_Unpickler(stream, encoding="latin1").load())


def _cifar(name: str, base: Path, cache: Path) -> Listed:
    """Unpack the batches below ``cache``, unless they are there: ``train/00000.png`` and so on, in their order."""
    batches, meta, key = _CIFAR[name]
    classes = [str(label) for label in _unpickle(base / meta)[key]]
    images: dict[str, np.ndarray] = {}
    splits: dict[str, Rows] = {}
    identity = ""
    for split, names in batches.items():
        found = [_unpickle(base / file) for file in names]
        status = [(base / file).stat() for file in names]
        identity += "".join(f"{n} {s.st_size} {s.st_mtime_ns};" for n, s in zip(names, status, strict=True))
        labels = [label for batch in found for label in batch.get("labels", batch.get("fine_labels", []))]
        images[split] = np.concatenate([np.asarray(batch["data"]) for batch in found]).reshape(-1, 3, 32, 32)
        if len(labels) != len(images[split]):
            raise UserError(f"{base / names[0]}: {len(images[split])} images but {len(labels)} labels")
        splits[split] = [(f"{split}/{i:05d}.png", classes[label]) for i, label in enumerate(labels)]
    folder = cache / f"{name}-{hashlib.sha256(identity.encode()).hexdigest()[:12]}"
    if not folder.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        with staged(folder, folder=True) as temporary:
            for split, pixels in images.items():
                (temporary / split).mkdir()
                for i, image in track(enumerate(pixels), len(pixels), f"unpacking {split}", "images"):
                    picture = Image.fromarray(np.ascontiguousarray(image.transpose(1, 2, 0)))
                    picture.save(temporary / split / f"{i:05d}.png", compress_level=1)
    return folder, classes, splits


def _cub200(base: Path) -> Listed:
    """Read ``images.txt``, ``image_class_labels.txt`` (from 1), ``train_test_split.txt`` (1: training), all by id."""
    images, labels, training, names = (dict(line.split(maxsplit=1) for line in _lines(base / f"{name}.txt"))
        for name in ("images", "image_class_labels", "train_test_split", "classes"))  # fmt: skip
    splits: dict[str, Rows] = {"train": [], "test": []}
    for key, name in images.items():
        splits["train" if training[key] == "1" else "test"].append((f"images/{name}", names[labels[key]]))
    return base, list(names.values()), splits


def _caltech101(base: Path) -> Listed:
    """Read class folders; the background class is none (as in torchvision)."""
    root = base / "101_ObjectCategories"
    classes = sorted(p.name for p in root.iterdir() if p.is_dir() and p.name != "BACKGROUND_Google")
    files = [file for name in classes for file in sorted((root / name).iterdir()) if file.suffix.lower() == ".jpg"]
    return root, classes, {"all": [(f"{file.parent.name}/{file.name}", file.parent.name) for file in files]}


def _sun397(base: Path) -> Listed:
    """Read ``ClassName.txt`` ("/a/abbey") and the authors' first partition, beside the images or one folder up."""
    images = base / "SUN397" if (base / "SUN397" / "a").is_dir() else base
    around = [base, base / "Partitions", base.parent, base.parent / "Partitions"]
    splits: dict[str, Rows] = {}
    for split, file in (("train", "Training_01.txt"), ("test", "Testing_01.txt")):
        folder = next((place for place in around if (place / file).is_file()), None)
        if folder is None:
            raise UserError(f"{base / file}: missing; unpack the authors' Partitions.zip there")
        splits[split] = [(name[1:], name.rpartition("/")[0]) for name in _lines(folder / file)]
    return images, _lines(base / "ClassName.txt"), splits


def _food101(base: Path) -> Listed:
    """Read ``meta/classes.txt`` and, for each split, JSON with the names of every class's images."""
    classes, splits = _lines(base / "meta" / "classes.txt"), {}
    for split in ("train", "test"):
        found = json.loads("\n".join(_lines(base / "meta" / f"{split}.json")))
        splits[split] = [(f"{name}.jpg", label) for label in classes for name in found[label]]
    return base / "images", classes, splits


def _flowers102(base: Path) -> Listed:
    """Read ``imagelabels.mat`` (from 1) and ``setid.mat`` (numbers of images, from 1)."""
    labels = [int(label) for label in _mat(base / "imagelabels.mat")["labels"]]
    sets, keys = _mat(base / "setid.mat"), {"train": "trnid", "val": "valid", "test": "tstid"}
    splits = {split: [(f"jpg/image_{int(at):05d}.jpg", str(labels[int(at) - 1])) for at in sets[key]]
              for split, key in keys.items()}  # fmt: skip
    return base, [str(number) for number in range(1, max(labels) + 1)], splits


def _pets(base: Path) -> Listed:
    """Read lines ``Abyssinian_100 1 1 1``: name, class (from 1), species, breed."""
    numbers: dict[str, int] = {}
    splits: dict[str, Rows] = {}
    for split, file in (("train", "trainval.txt"), ("test", "test.txt")):
        fields = [line.split() for line in _lines(base / "annotations" / file) if not line.startswith("#")]
        splits[split] = [(f"images/{name}.jpg", name.rpartition("_")[0]) for name, *_ in fields]
        numbers |= {name.rpartition("_")[0]: int(label) for name, label, *_ in fields}
    return base, sorted(numbers, key=lambda name: numbers[name]), splits


def _aircraft(base: Path) -> Listed:
    """Read lines ``1025794 707-320``: image and variant."""
    data = base / "data"
    splits: dict[str, Rows] = {}
    for split in ("train", "val", "test"):
        fields = [line.split(maxsplit=1) for line in _lines(data / f"images_variant_{split}.txt")]
        splits[split] = [(f"images/{name}.jpg", variant) for name, variant in fields]
    known = data / "variants.txt"
    return data, _lines(known) if known.is_file() else sorted({label for _, label in splits["train"]}), splits


def _cars(base: Path) -> Listed:
    """Read the devkit's ``annotations`` (``fname``, ``class`` from 1); the test set's have lain in two places."""
    test = "cars_test_annos_withlabels.mat"
    files = {"train": base / "devkit" / "cars_train_annos.mat"}
    files["test"] = base / test if (base / test).is_file() else base / "devkit" / test
    names = [str(name) for name in _mat(base / "devkit" / "cars_meta.mat")["class_names"]]
    splits = {split: [(f"cars_{split}/{row['fname']}", names[int(row["class"]) - 1])
                      for row in _mat(file)["annotations"]] for split, file in files.items()}  # fmt: skip
    return base, names, splits


class Archive(NamedTuple):
    """Place of a set: a marker file, or with a slash folder, in one of ``folders``."""

    marker: str
    folders: tuple[str, ...]
    read: Callable[..., Listed]  # of the folder; CIFAR's also of the cache

    def find(self, root: Path, name: str) -> Path | None:
        """Find the folder with the marker below ``root`` or ``root``/``name``, or None."""
        places = (base / folder for base in (root, root / name) for folder in ("", *self.folders))
        is_there = Path.is_dir if self.marker.endswith("/") else Path.is_file
        return next((place for place in places if is_there(place / self.marker)), None)


ARCHIVES: dict[str, Archive] = {
    "cifar10": Archive("data_batch_1", ("cifar-10-batches-py",), partial(_cifar, "cifar10")),
    "cifar100": Archive("train", ("cifar-100-python",), partial(_cifar, "cifar100")),
    "cub200": Archive("train_test_split.txt", ("CUB_200_2011",), _cub200),
    "caltech101": Archive("101_ObjectCategories/", ("caltech101", "caltech-101"), _caltech101),
    "sun397": Archive("ClassName.txt", ("SUN397",), _sun397),
    "food101": Archive("meta/classes.txt", ("food-101",), _food101),
    "flowers102": Archive("setid.mat", ("flowers-102",), _flowers102),
    "pets": Archive("annotations/trainval.txt", ("oxford-iiit-pet",), _pets),
    "aircraft": Archive("data/images_variant_train.txt", ("fgvc-aircraft-2013b",), _aircraft),
    "cars": Archive("devkit/cars_train_annos.mat", ("stanford_cars",), _cars),
}
