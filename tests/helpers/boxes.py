"""Small data sets with boxes, laid out as VOC and COCO are: coloured rectangles on grey noise."""

import json
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

COLOURS = {"car": (220, 40, 40), "cat": (40, 200, 60), "person": (50, 80, 230)}
COCO_IDS = {"car": 3, "cat": 17, "person": 1}
TRAIN, TEST = 12, 6


class Scene(NamedTuple):
    """An image and its objects as (class, x1, y1, x2, y2), whole pixels."""

    image: Image.Image
    objects: list[tuple[str, int, int, int, int]]


def scene(number: int) -> Scene:
    """Draw one or two objects on an image that is wide or, one time in three, tall."""
    rng = np.random.default_rng(number)
    width, height = (96, 72) if number % 3 else (72, 96)
    pixels = rng.integers(90, 130, (height, width, 3), dtype=np.uint8)
    objects = []
    for left in (4, width // 2 + 2)[: 1 + number % 2]:
        name = list(COLOURS)[rng.integers(3)]
        wide, high = rng.integers(22, width // 2 - 6), rng.integers(26, height - 10)
        top = int(rng.integers(2, height - high - 2))
        pixels[top : top + high, left : left + wide] = COLOURS[name]
        objects.append((name, left, top, int(left + wide), int(top + high)))
    return Scene(Image.fromarray(pixels), objects)


def write_voc(root: Path) -> Path:
    """Write VOC 2007 (trainval, test) and 2012 (trainval) below ``root``. Returns the folder VOCdevkit."""
    kit = root / "VOCdevkit"
    half = TRAIN // 2
    splits = {("VOC2007", "trainval"): range(half), ("VOC2012", "trainval"): range(half, TRAIN),
              ("VOC2007", "test"): range(TRAIN, TRAIN + TEST)}  # fmt: skip
    for (year, split), numbers in splits.items():
        for folder in ("Annotations", "JPEGImages", "ImageSets/Main"):
            (kit / year / folder).mkdir(parents=True, exist_ok=True)
        for number in numbers:
            image, objects = scene(number)
            image.save(kit / year / "JPEGImages" / f"{number:06d}.jpg", quality=95)
            (kit / year / "Annotations" / f"{number:06d}.xml").write_text(voc_xml(image.size, objects))
        (kit / year / "ImageSets/Main" / f"{split}.txt").write_text("".join(f"{number:06d}\n" for number in numbers))
    return kit


def voc_xml(size: tuple[int, int], objects: list[tuple[str, int, int, int, int]], difficult: int = 0) -> str:
    """Format an annotation; VOC's first pixel is 1."""
    things = "".join(
        f"<object><name>{name}</name><difficult>{difficult}</difficult><bndbox><xmin>{left + 1}</xmin>"
        f"<ymin>{top + 1}</ymin><xmax>{right}</xmax><ymax>{bottom}</ymax></bndbox></object>"
        for name, left, top, right, bottom in objects
    )
    shape = f"<size><width>{size[0]}</width><height>{size[1]}</height><depth>3</depth></size>"
    return f"<annotation>{shape}{things}</annotation>"


def write_coco(root: Path) -> Path:
    """Write train2017, val2017 and their instances; the last training image has no object. Returns ``root``."""
    (root / "annotations").mkdir(parents=True)
    for split, numbers in (("train2017", range(TRAIN + 1)), ("val2017", range(TRAIN + 1, TRAIN + 1 + TEST))):
        (root / split).mkdir()
        images, rows = [], []
        for number in numbers:
            image, objects = scene(number)
            name = f"{number:012d}.jpg"
            image.save(root / split / name, quality=95)
            images.append({"id": number, "file_name": name, "width": image.width, "height": image.height})
            for kind, left, top, right, bottom in objects if number != TRAIN else []:
                box = [left, top, right - left, bottom - top]
                about = {"id": len(rows) + 1, "image_id": number, "category_id": COCO_IDS[kind], "iscrowd": 0}
                rows.append(about | {"bbox": box, "area": box[2] * box[3]})
        categories = [{"id": place, "name": name} for name, place in COCO_IDS.items()]
        content = {"images": images, "annotations": rows, "categories": categories}
        (root / "annotations" / f"instances_{split}.json").write_text(json.dumps(content))
    return root
