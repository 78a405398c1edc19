"""Every data set of the paper, as a miniature in its true format on disk, gives the right images and splits."""

import json
import pickle
from collections.abc import Callable
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.io import savemat

from cocor.eval.datasets.protocols import PROTOCOLS, TRANSFER
from cocor.eval.datasets.splits import Absent, open_named, open_splits, random_split
from loaders.datasets.decode import decode
from loaders.errors import UserError
from loaders.prep.convert import convert
from loaders.prep.encode import Settings
from loaders.prep.source import read_classes
from loaders.prep.sources import open_source


def jpeg(path: Path, value: int = 0) -> None:
    """A picture of one colour that tells which one it is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (20, 16), (value % 256, 128, 60)).save(path, "JPEG", quality=95)


def lines(path: Path, rows: list[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(rows) + "\n")


def pickled(path: Path, content: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(pickle.dumps(content))


PIXELS = np.random.default_rng(0).integers(0, 256, (60, 3072), dtype=np.uint8)


def cifar10(root: Path) -> None:
    base = root / "cifar-10-batches-py"
    for i in range(5):
        part = slice(i * 10, i * 10 + 10)
        pickled(base / f"data_batch_{i + 1}", {"data": PIXELS[part], "labels": [j % 3 for j in range(10)]})
    pickled(base / "test_batch", {"data": PIXELS[50:], "labels": [2] * 10})
    pickled(base / "batches.meta", {"label_names": ["plane", "car", "bird"]})


def cifar100(root: Path) -> None:
    base = root / "cifar-100-python"
    for split, part in (("train", slice(0, 40)), ("test", slice(40, 60))):
        labels = [i % 4 for i in range(part.stop - part.start)]
        pickled(base / split, {"data": PIXELS[part], "fine_labels": labels, "coarse_labels": [0] * len(labels)})
    pickled(base / "meta", {"fine_label_names": list("abcd"), "coarse_label_names": ["x"]})


def cub200(root: Path) -> None:
    base = root / "CUB_200_2011"
    names = [f"{c:03d}.Bird_{c}/Bird_{c}_{i}.jpg" for c in (1, 2) for i in range(8)]
    for i, name in enumerate(names):
        jpeg(base / "images" / name, i)
    lines(base / "images.txt", [f"{i} {name}" for i, name in enumerate(names, 1)])
    lines(base / "image_class_labels.txt", [f"{i} {int(name[:3])}" for i, name in enumerate(names, 1)])
    lines(base / "train_test_split.txt", [f"{i} {int(i % 4 > 0)}" for i in range(1, 17)])
    lines(base / "classes.txt", ["1 001.Bird_1", "2 002.Bird_2"])


def caltech101(root: Path) -> None:
    for name, i in product(("BACKGROUND_Google", "accordion", "airplanes"), range(33)):
        jpeg(root / "caltech101" / "101_ObjectCategories" / name / f"image_{i:04d}.jpg", i)


def sun397(root: Path) -> None:
    lines(root / "SUN397" / "ClassName.txt", ["/a/abbey", "/a/apartment_building/outdoor"])
    for split, rows in (("Training", range(10)), ("Testing", range(10, 16))):
        names = [f"/a/{'abbey' if i % 2 else 'apartment_building/outdoor'}/sun_{i}.jpg" for i in rows]
        lines(root / "Partitions" / f"{split}_01.txt", names)
        for name in names:
            jpeg(root / "SUN397" / name[1:])


def food101(root: Path) -> None:
    base = root / "food-101"
    lines(base / "meta" / "classes.txt", ["apple_pie", "waffles"])
    for split, rows in (("train", range(10)), ("test", range(10, 14))):
        found = {c: [f"{c}/{i}" for i in rows] for c in ("waffles", "apple_pie")}
        lines(base / "meta" / f"{split}.json", [json.dumps(found)])
        for name in (*found["waffles"], *found["apple_pie"]):
            jpeg(base / "images" / f"{name}.jpg")


def flowers102(root: Path) -> None:
    base = root / "flowers-102"
    for i in range(1, 19):
        jpeg(base / "jpg" / f"image_{i:05d}.jpg", i)
    savemat(base / "imagelabels.mat", {"labels": np.array([[1, 2, 3] * 6])})
    ids = {"trnid": [[1, 2, 3, 4, 5, 6]], "valid": [[7, 8, 9]], "tstid": [[10, 11, 12, 13, 14, 15, 16, 17, 18]]}
    savemat(base / "setid.mat", {key: np.array(value) for key, value in ids.items()})


def pets(root: Path) -> None:
    base = root / "oxford-iiit-pet"
    for split, rows in (("trainval", range(10)), ("test", range(10, 14))):
        found = {f"{'Abyssinian' if i % 2 else 'great_pyrenees'}_{i}": 2 - i % 2 for i in rows}
        lines(base / "annotations" / f"{split}.txt", [f"{name} {label} 1 1" for name, label in found.items()])
        for name in found:
            jpeg(base / "images" / f"{name}.jpg")


def aircraft(root: Path) -> None:
    data = root / "fgvc-aircraft-2013b" / "data"
    lines(data / "variants.txt", ["707-320", "Boeing 717"])
    for at, split in enumerate(("train", "val", "test")):
        found = {f"{at}{i:06d}": ("707-320", "Boeing 717")[i % 2] for i in range(4)}
        lines(data / f"images_variant_{split}.txt", [f"{name} {variant}" for name, variant in found.items()])
        for name in found:
            jpeg(data / "images" / f"{name}.jpg")


def cars(root: Path) -> None:
    base = root / "stanford_cars"
    kind = [("bbox_x1", "O"), ("class", "O"), ("fname", "O")]
    (base / "devkit").mkdir(parents=True)
    for split, file in (("train", "devkit/cars_train_annos.mat"), ("test", "cars_test_annos_withlabels.mat")):
        rows = [(3, i % 2 + 1, f"{i:05d}.jpg") for i in range(1, 17)]
        savemat(base / file, {"annotations": np.array(rows, kind)})
        for row in rows:
            jpeg(base / f"cars_{split}" / row[2])
    savemat(base / "devkit" / "cars_meta.mat", {"class_names": np.array(["AM General", "Acura"], object)})


# (train, val, test) of the miniature
SIZES = {
    cifar10: (45, 5, 10), cifar100: (36, 4, 20), cub200: (10, 2, 4), caltech101: (50, 10, 6), sun397: (8, 2, 6),
    food101: (18, 2, 8), flowers102: (6, 3, 9), pets: (8, 2, 4), aircraft: (4, 4, 4), cars: (14, 2, 16),
}  # fmt: skip


LABELS = {
    cub200: ("images/002.Bird_2/Bird_2_3.jpg", "002.Bird_2"),
    sun397: ("a/apartment_building/outdoor/sun_4.jpg", "/a/apartment_building/outdoor"),
    flowers102: ("jpg/image_00008.jpg", "2"), pets: ("images/great_pyrenees_10.jpg", "great_pyrenees"),
    aircraft: ("images/2000003.jpg", "Boeing 717"), cars: ("cars_test/00004.jpg", "AM General"),
    food101: ("waffles/11.jpg", "waffles"),
}  # fmt: skip


@pytest.mark.parametrize("make", SIZES, ids=lambda make: make.__name__)
@pytest.mark.parametrize("below", [False, True])
def test_every_set_opens_from_its_archives_layout(make: Callable[[Path], None], below: bool, tmp_path: Path) -> None:
    name = make.__name__
    make(tmp_path / name if below else tmp_path)
    splits = open_named(name, tmp_path, tmp_path / "cache")
    parts = (splits.train, splits.val, splits.test)
    assert tuple(map(len, parts)) == SIZES[make]
    assert splits.protocol is PROTOCOLS[name] and splits.notes  # a miniature is not the whole
    files = [path for part in parts for path in part.paths]
    assert len(set(files)) == len(files) == sum(SIZES[make]) and all(Path(path).is_file() for path in files)
    labels = {n: p.classes[label] for p in parts for n, label in zip(p.names, p.labels.tolist(), strict=True)}
    file, label = LABELS.get(make, ("", ""))
    assert labels.get(file, "") == label  # that of the authors' lists
    again = open_named(name, tmp_path, tmp_path / "cache")
    assert [part.names for part in (again.train, again.val, again.test)] == [part.names for part in parts]
    if make is caltech101:
        assert [np.bincount(part.labels).tolist() for part in parts[:2]] == [[25, 25], [5, 5]]


def test_cifar_pixels_survive_unharmed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cifar10(tmp_path)
    test = open_named("cifar10", tmp_path, tmp_path / "cache").test
    pixels = np.asarray(decode(test.paths[3])).transpose(2, 0, 1).reshape(-1)
    assert np.array_equal(pixels, PIXELS[53]) and test.classes[test.labels[3]] == "bird"
    pickled(tmp_path / "cifar-10-batches-py" / "test_batch", Harmful())
    with pytest.raises(UserError, match="which no CIFAR batch holds"):
        open_named("cifar10", tmp_path, tmp_path / "cache")
    assert "code ran" not in capsys.readouterr().out


class Harmful:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return print, ("code ran",)


def test_the_drawn_split_is_random_splits() -> None:
    protocol = PROTOCOLS["cifar10"]
    train, val = random_split(np.arange(50000), protocol)
    expected = torch.utils.data.random_split(range(50000), [45000, 5000], torch.Generator().manual_seed(43))  # type: ignore[arg-type]
    assert train.tolist() == list(expected[0].indices) and val.tolist() == list(expected[1].indices)


def test_imagenet_and_its_hundred_classes(tmp_path: Path) -> None:
    wanted = read_classes("imagenet100")
    for name in [*wanted, "n99999999"]:
        for i in range(2):
            jpeg(tmp_path / "ILSVRC2012" / "train" / name / f"{name}_{i}.JPEG")
        jpeg(tmp_path / "ILSVRC2012" / "val" / name / f"val_{name}.JPEG")
    found = open_named("imagenet100", tmp_path, tmp_path / "cache")
    assert found.train.classes == wanted and (len(found.train), len(found.val), len(found.test)) == (100, 100, 100)
    assert all(name.startswith(wanted[label]) for name, label in zip(found.test.names, found.test.labels, strict=True))
    assert len(open_named("imagenet1k", tmp_path, tmp_path / "cache").test) == 101


def test_absent_differs_from_incomplete(tmp_path: Path) -> None:
    for name in PROTOCOLS:
        with pytest.raises(Absent, match="looked for"):
            open_named(name, tmp_path, tmp_path / "cache")
    food101(tmp_path)
    (tmp_path / "food-101" / "images" / "waffles" / "11.jpg").unlink()
    with pytest.raises(UserError, match=r"11\.jpg") as caught:
        open_named("food101", tmp_path, tmp_path / "cache")
    assert not isinstance(caught.value, Absent)


def test_a_folder_of_ones_own(tmp_path: Path) -> None:
    for split, count in (("train", 20), ("test", 4)):
        for name in ("x", "y"):
            for i in range(count):
                jpeg(tmp_path / "mine" / split / name / f"{i}.jpg")
    found = open_splits(tmp_path / "mine")
    assert (len(found.train), len(found.val), len(found.test)) == (36, 4, 8)
    both = found.learned_from()
    assert both.file_sizes is not None and len(both) == 40
    assert both.file_sizes.tolist() == [Path(path).stat().st_size for path in both.paths]
    named = tmp_path / "cifar10"
    (tmp_path / "mine").rename(named)
    assert open_named("cifar10", tmp_path, tmp_path / "cache").protocol.metric == "top1"
    (named / "test").rename(named / "tset")
    with pytest.raises(UserError, match="no val or test folder"):
        open_splits(named)


def test_the_table_of_protocols_adds_up() -> None:
    assert len(TRANSFER) == 10
    totals = {name: (p.train + p.val, p.test) for name, p in PROTOCOLS.items() if p.train}
    assert totals == {
        "cifar10": (50000, 10000), "cifar100": (50000, 10000), "cub200": (5994, 5794), "caltech101": (3030, 5647),
        "sun397": (19850, 19850), "food101": (75750, 25250), "flowers102": (2040, 6149), "pets": (3680, 3669),
        "aircraft": (6667, 3333), "cars": (8144, 8041),
    }  # fmt: skip


def test_the_readme_states_the_protocols() -> None:
    text = (Path(__file__).parents[2] / "cocor" / "eval" / "README.md").read_text()
    for name, row in PROTOCOLS.items():
        train, val = (f"{count:,}" if count else None for count in (row.train, row.val))
        seed = "authors'" if row.seed is None else row.seed
        end = f"{row.test:,} | {seed} | {row.metric} | {row.source} |"
        found = next(line for line in text.splitlines() if line.startswith(f"| `{name}` |"))
        assert found.endswith(end) and (train is None or found.startswith(f"| `{name}` | {train} / {val} / "))


def test_prepared_files_stand_for_class_folders(corner_folder: Path, tmp_path: Path) -> None:
    for split in ("train", "val"):
        convert(open_source(corner_folder), tmp_path / f"{split}.beton", "beton", Settings(), workers=1)
    found = open_splits(tmp_path)
    assert (len(found.train), len(found.val), len(found.test)) == (4, 2, 6)
    both, test = ({part.names[at]: part.image(at).decode().size for at in range(len(part))}
                  for part in (found.learned_from(), found.test))  # fmt: skip
    assert both == test


@pytest.mark.parametrize("make", SIZES, ids=lambda make: make.__name__)
def test_damaged_lists_are_one_line(make: Callable[[Path], None], tmp_path: Path) -> None:
    make(tmp_path)
    lists = [path for path in sorted(tmp_path.rglob("*")) if path.is_file() and path.suffix != ".jpg"]
    for path in lists:
        whole = path.read_bytes()
        for content in (b"", b"rubbish\n", b"\xff\xfe\x00 1 2\n", whole[: len(whole) // 2], b"[1, 2]"):
            path.write_bytes(content)
            try:
                open_named(make.__name__, tmp_path, tmp_path / "cache")
            except UserError as error:
                assert "\n" not in str(error) and str(tmp_path) in str(error)
        path.write_bytes(whole)
    open_named(make.__name__, tmp_path, tmp_path / "cache")
