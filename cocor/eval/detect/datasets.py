"""Read PASCAL VOC 2007 + 2012 and COCO 2017 as they are distributed.

DIR/VOCdevkit/VOC2007, VOC2012/{Annotations,ImageSets/Main,JPEGImages}   trained on trainval07+12, tested on test07
DIR/{train2017,val2017}, DIR/annotations/instances_{train,val}2017.json
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
from numpy.typing import NDArray

from loaders.errors import UnusableImage, UserError
from loaders.progress import track

VOC_CLASSES = ("aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow", "diningtable",
               "dog", "horse", "motorbike", "person", "pottedplant", "sheep", "sofa", "train", "tvmonitor")  # fmt: skip


@dataclass(frozen=True)
class AnnotatedImage:
    """Image file and its N objects.

    ``boxes`` float32 (N, 4): x1, y1, x2, y2 in pixels from the upper left corner; ``labels`` int64 (N,): places among
    the classes; ``areas`` float32 (N,) in pixels. A test counts neither ``crowd`` (COCO) nor ``difficult`` (VOC)
    objects, bool (N,), as found or missed. ``size`` is (width, height).
    """

    id: int | str
    path: Path
    size: tuple[int, int]
    boxes: NDArray[np.float32]
    labels: NDArray[np.int64]
    areas: NDArray[np.float32]
    crowd: NDArray[np.bool_]
    difficult: NDArray[np.bool_]


@dataclass(frozen=True)
class DetectionSet:
    """Images with boxes of ``classes``.

    Files of detections call these by ``category_ids``. Its measure averages precision over ``points`` recalls: 11 of
    VOC 2007, 101 of COCO.
    """

    classes: tuple[str, ...]
    category_ids: tuple[int, ...]
    images: tuple[AnnotatedImage, ...]
    points: int
    notes: tuple[str, ...] = ()


def open_sets(name: str, root: Path, on_error: str) -> tuple[DetectionSet, DetectionSet]:
    """Read the training and the test images of ``voc0712`` or ``coco`` below ``root``.

    Raises:
        UserError: a file is missing or not in the set's format, there are no boxes or unknown classes, or, unless
            ``on_error`` is "skip", an annotation of VOC is unusable or has no object.
    """
    train, test = _voc(root, on_error) if name == "voc0712" else _coco(root)
    for split, images in (("training", train.images), ("test", test.images)):
        if not sum(len(image.boxes) for image in images):
            raise UserError(f"--root {root}: the {split} images of {name} have no boxes; is it the set as distributed?")
        _check_files(images)
    return train, test


def _check_files(images: Sequence[AnnotatedImage]) -> None:
    folders = {image.path.parent for image in images}
    there = {folder: {file.name for file in folder.iterdir()} if folder.is_dir() else set() for folder in folders}
    lost = [image.path for image in images if image.path.name not in there[image.path.parent]]
    if lost:
        raise UserError(f"{lost[0]}: missing, as are {len(lost) - 1:,} more of its set; unpack the images there")


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; unpack the data set's archives below --root") from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: no text; unpack the data set's archives again") from None


def _voc(root: Path, on_error: str) -> tuple[DetectionSet, DetectionSet]:
    kit = root / "VOCdevkit" if (root / "VOCdevkit").is_dir() else root
    train = [(kit / year, stem) for year in ("VOC2007", "VOC2012") for stem in _names(kit / year, "trainval")]
    test = [(kit / "VOC2007", stem) for stem in _names(kit / "VOC2007", "test")]
    return _voc_set(train, "training", on_error), _voc_set(test, "test", on_error)


def _names(folder: Path, split: str) -> list[str]:
    return _read(folder / "ImageSets" / "Main" / f"{split}.txt").split()


def _voc_set(places: Sequence[tuple[Path, str]], split: str, on_error: str) -> DetectionSet:
    images, faults = [], []
    for place in track(places, len(places), f"reading {split} annotations"):
        try:
            images.append(_voc_image(*place))
        except UnusableImage as fault:
            if on_error == "stop":
                raise UserError(f"{fault}; --on-error skip leaves such images out") from None
            faults.append(str(fault))
    return DetectionSet(VOC_CLASSES, tuple(range(1, 21)), tuple(images), 11, _left_out(faults, split))


def _left_out(faults: Sequence[str], split: str) -> tuple[str, ...]:
    return (f"{len(faults):,} {split} images left out, such as {faults[0]}",) if faults else ()


def _voc_image(folder: Path, stem: str) -> AnnotatedImage:
    file = folder / "Annotations" / f"{stem}.xml"
    try:
        tree = ElementTree.fromstring(_read(file))
        objects, sides = tree.findall("object"), ("xmin", "ymin", "xmax", "ymax")
        names = [thing.findtext("name", "") for thing in objects]
        corners = [[float(thing.findtext(f"bndbox/{side}", "")) for side in sides] for thing in objects]
        difficult = [thing.findtext("difficult") == "1" for thing in objects]
        size = int(tree.findtext("size/width", "")), int(tree.findtext("size/height", ""))
    except (ElementTree.ParseError, ValueError) as error:
        raise UnusableImage(f"{file}: not an annotation of VOC ({error})") from None
    if strange := sorted(set(names) - set(VOC_CLASSES)):
        raise UserError(f"{file}: {strange[0]} is none of VOC's 20 classes; give the set as distributed")
    boxes = np.array(corners, np.float32).reshape(-1, 4) - np.array([1, 1, 0, 0], np.float32)  # VOC's first pixel is 1
    if not objects or (boxes[:, 2:] <= boxes[:, :2]).any():
        raise UnusableImage(f"{file}: {'a box without area' if objects else 'no object'} in it")
    labels = np.array([VOC_CLASSES.index(name) for name in names])
    path, crowd = folder / "JPEGImages" / f"{stem}.jpg", np.zeros(len(names), bool)
    return AnnotatedImage(stem, path, size, boxes, labels, np.prod(boxes[:, 2:] - boxes[:, :2], 1), crowd,
                          np.array(difficult))  # fmt: skip


def _coco(root: Path) -> tuple[DetectionSet, DetectionSet]:
    train, test = (_coco_set(root, split) for split in ("train2017", "val2017"))
    if train.classes != test.classes or train.category_ids != test.category_ids:
        other = sorted(set(train.classes) ^ set(test.classes)) or ["their order"]
        raise UserError(f"{root / 'annotations'}: the categories of train2017 and val2017 differ in {other[0]}; "
                        "give both the same list")  # fmt: skip
    return train, test


def _coco_set(root: Path, split: str) -> DetectionSet:
    file = root / "annotations" / f"instances_{split}.json"
    try:
        content = json.loads(_read(file))
        categories = sorted(content["categories"], key=lambda category: category["id"])
        places = {category["id"]: place for place, category in enumerate(categories)}
        objects: dict[int, list[dict[str, Any]]] = {image["id"]: [] for image in content["images"]}
        for thing in content["annotations"]:
            objects[thing["image_id"]].append(thing)
        keep = _learned_from if split == "train2017" else lambda thing: True
        rows = content["images"]
        images = [_coco_image(root / split, row, list(filter(keep, objects[row["id"]])), places) for row in rows]
        classes = tuple(str(category["name"]) for category in categories)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        why = f"{type(error).__name__}: {error}"[:100]
        raise UserError(f"{file}: not COCO's instances with boxes and categories ({why})") from None
    if split == "val2017":
        return DetectionSet(classes, tuple(places), tuple(images), 101)
    # As distributed, train2017 has a thousand images without objects, which detectors are not trained on.
    empty = [f"{image.path.name}: no object in it" for image in images if not len(image.boxes)]
    filled = tuple(image for image in images if len(image.boxes))
    return DetectionSet(classes, tuple(places), filled, 101, _left_out(empty, "training"))


def _learned_from(thing: dict[str, Any]) -> bool:
    return not thing.get("iscrowd", 0) and min(thing["bbox"][2:]) > 0


def _coco_image(
    folder: Path, row: dict[str, Any], things: list[dict[str, Any]], places: dict[int, int]
) -> AnnotatedImage:
    boxes = np.array([thing["bbox"] for thing in things], np.float32).reshape(-1, 4)
    boxes[:, 2:] += boxes[:, :2]
    labels = np.array([places[thing["category_id"]] for thing in things], np.int64)
    areas = np.array([thing["area"] for thing in things], np.float32)
    crowd = np.array([bool(thing.get("iscrowd", 0)) for thing in things], bool)
    size = int(row["width"]), int(row["height"])
    return AnnotatedImage(row["id"], folder / row["file_name"], size, boxes, labels, areas, crowd, np.zeros_like(crowd))
