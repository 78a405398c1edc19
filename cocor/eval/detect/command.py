"""Run ``cocor-eval detect``: fine-tune a detector, measure it, draw its boxes."""

import argparse
import json
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from cocor.eval.detect.average_precision import MEASURES, Rows, average_precision, check_installed
from cocor.eval.detect.datasets import DetectionSet, open_sets
from cocor.eval.detect.finetune import Work, detect_objects, fine_tune
from cocor.eval.detect.model import build_detector
from cocor.eval.detect.recipe import Recipe, chosen_recipe
from cocor.panels import panels, shown
from cocor.weights.load import Encoder
from loaders.cpus import available_cores
from loaders.datasets.decode import decode
from loaders.files import write_text

_SHOWN, _SURE = 6, 0.5  # images of the picture, and the least score of a box there


@dataclass(frozen=True)
class Detection:
    """Fine-tuned detector's recipe and average precision in percent (None: of nothing)."""

    title: str
    recipe: Recipe
    test: DetectionSet
    notes: tuple[str, ...]
    losses: list[float]
    precision: dict[str, float | None]
    boxes: Rows

    def lines(self) -> list[str]:
        """Format the report for people: a table of the measures."""
        values = [self.precision[name] for name in MEASURES]
        cells = ["-" if value is None else f"{value:.2f}" for value in values]
        head = ["| " + " | ".join(row) + " |" for row in (MEASURES, ["--:"] * len(cells), cells)]
        return [f"{self.title}, {len(self.test.images):,} test images", *head]

    def plain(self) -> dict[str, Any]:
        """Convert to what a report holds."""
        recipe = {"recipe": asdict(self.recipe), "measure": f"pycocotools, {self.test.points} recalls"}
        return recipe | {"losses": self.losses, "test_images": len(self.test.images), "precision": self.precision}


def detection(args: argparse.Namespace, encoder: Encoder, folder: Path) -> Detection | None:
    """Fine-tune and test as the flags say; the result on the main rank, else None.

    Checkpoints and detections go to ``folder``.

    Raises:
        UserError: the encoder, the data or a checkpoint does not fit, or pycocotools is missing.
    """
    check_installed()
    recipe = chosen_recipe(args)
    train, test = open_sets(args.dataset, args.root, args.on_error)
    workers = available_cores() if args.workers is None else args.workers
    work = Work(args.world, workers, args.on_error, folder, args.checkpoint_every)
    half = args.precision == "bf16" or (args.precision is None and args.world.device.type == "cuda")
    kind = torch.bfloat16 if half else torch.float32
    torch.manual_seed(recipe.seed)
    model = build_detector(args.detector, encoder, len(train.classes), recipe, kind)
    identity = {"detector": args.detector, "encoder": encoder.digest, "images": str(len(train.images))}
    identity |= {"classes": ", ".join(train.classes), "precision": str(kind)}
    identity |= {"mean": str(encoder.mean), "std": str(encoder.std)}
    losses = fine_tune(model, train, recipe, work, identity)
    boxes, read = detect_objects(model, test, work)
    if not args.world.main:
        return None
    write_text(folder / "detections.json", json.dumps(boxes) + "\n")
    found = average_precision(read, boxes)
    title = f"{encoder.name} on {args.dataset}, {args.detector.upper()}, {recipe.iterations:,} iterations"
    return Detection(title, recipe, read, train.notes + test.notes, losses, found, boxes)


def draw_detections(path: Path, found: Detection) -> None:
    """Draw the boxes of score 0.5 or more on a few test images; true boxes are dashed."""
    step = max(1, len(found.test.images) // _SHOWN)
    chosen = list(islice(found.test.images, 0, None, step))[:_SHOWN]
    names = dict(zip(found.test.category_ids, found.test.classes, strict=True))
    with panels(path, len(chosen), columns=3) as axes:
        from matplotlib.patches import Rectangle

        for panel, image in zip(axes, chosen, strict=True):
            panel.imshow(decode(str(image.path)))
            panel.axis("off")
            for left, top, right, bottom in image.boxes.tolist():
                corner, width, height = (left, top), right - left, bottom - top
                panel.add_patch(Rectangle(corner, width, height, fill=False, color="white", linestyle="--"))
            for row in found.boxes:
                if row["image_id"] == image.id and row["score"] >= _SURE:
                    (x, y, width, height), color = row["bbox"], f"C{row['category_id'] % 10}"
                    panel.add_patch(Rectangle((x, y), width, height, fill=False, color=color, linewidth=2))
                    text = f"{shown(names[row['category_id']])} {row['score']:.2f}"
                    panel.text(x, y, text, fontsize=7, color="white", backgroundcolor=color, va="bottom")
        axes[0].set_title(f"{shown(found.title)}; dashed: the truth")
