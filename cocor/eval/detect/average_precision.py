"""Compute average precision by pycocotools, with the recalls of COCO or VOC 2007."""

import contextlib
import importlib.util
import io
from collections.abc import Sequence
from typing import Any

import numpy as np

from cocor.eval.detect.datasets import DetectionSet
from loaders.errors import UserError

Rows = list[dict[str, Any]]
MEASURES = ("AP", "AP50", "AP75", "APs", "APm", "APl")


def check_installed() -> None:
    """Raise UserError if pycocotools is missing."""
    if importlib.util.find_spec("pycocotools") is None:
        raise UserError("average precision needs pycocotools: pip install pycocotools")


def average_precision(truth: DetectionSet, detections: Rows) -> dict[str, float | None]:
    """Average the precision over recalls, classes and IoU 0.50 to 0.95.

    ``detections`` are rows of COCO's result format: image_id, category_id, bbox (x, y, width, height), score. With
    VOC 2007's 11 recalls instead of COCO's 101 it is what Detectron2 reports for VOC. Returns AP, AP50, AP75, APs, APm,
    APl and the AP of every class, in percent; None where nothing was to be found.
    """
    from pycocotools.cocoeval import COCOeval

    class Evaluation(COCOeval):
        def _prepare(self) -> None:  # which lets only crowds be ignored
            super()._prepare()
            for rows in self._gts.values():
                for row in rows:
                    row["ignore"] = row["iscrowd"] or row["difficult"]

    found = [row | {"id": number, "area": row["bbox"][2] * row["bbox"][3], "iscrowd": 0}
             for number, row in enumerate(detections, 1)]  # fmt: skip
    with contextlib.redirect_stdout(io.StringIO()):
        evaluation = Evaluation(_indexed(truth, annotations(truth)), _indexed(truth, found), "bbox")
        evaluation.params.recThrs = np.linspace(0, 1, truth.points)
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    by_class = evaluation.eval["precision"][:, :, :, 0, -1].mean((0, 1))
    values = zip((*MEASURES, *truth.classes), (*evaluation.stats[:6], *by_class), strict=True)
    return {name: None if value < 0 else round(100 * float(value), 4) for name, value in values}


def annotations(truth: DetectionSet) -> Rows:
    """List all objects as COCO's annotations, with VOC's ``difficult``."""
    rows: Rows = []
    for image in truth.images:
        for box, label, area, crowd, difficult in zip(
            image.boxes.astype(float), image.labels, image.areas, image.crowd, image.difficult, strict=True
        ):
            about = {"id": len(rows) + 1, "image_id": image.id, "category_id": truth.category_ids[label]}
            flags = {"iscrowd": int(crowd), "difficult": int(difficult), "area": float(area)}
            rows.append(about | flags | {"bbox": [*box[:2], *(box[2:] - box[:2])]})
    return rows


def _indexed(truth: DetectionSet, rows: Sequence[dict[str, Any]]) -> Any:
    from pycocotools.coco import COCO

    result = COCO()
    categories = [{"id": number, "name": name} for number, name in zip(truth.category_ids, truth.classes, strict=True)]
    images = [{"id": image.id} for image in truth.images]
    result.dataset = {"images": images, "annotations": list(rows), "categories": categories}
    result.createIndex()
    return result
