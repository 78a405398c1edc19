"""Show nearest neighbours of images as a contact sheet (paper, figure 1 b).

A row is a query and its nearest neighbours in the bank, nearest first, with their cosine similarities; the colour of a
frame says whether the classes agree. Such rows show what an encoder attends to, which an accuracy cannot.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont, ImageOps
from torch import Tensor

from cocor.eval.features import Features
from cocor.eval.probes.knn import nearest_neighbours
from loaders.datasets.dataset import ImageDataset
from loaders.files import replacing
from loaders.text import printable

_TILE, _GAP, _FRAME, _FONT_SIZE, _LINE = 128, 8, 4, 12, 16
_RIGHT, _WRONG, _INK, _PAPER = "#2a9d4e", "#d1495b", "black", "white"


@dataclass(frozen=True)
class Retrieval:
    """Places of ``queries`` (Q,) and ``neighbours`` (Q, k), with ``similarities``.

    ``precision``: the share of the k neighbours that are of the query's own class, mean over *all* labelled queries;
    None if no query has a label.
    """

    queries: Tensor
    neighbours: Tensor
    similarities: Tensor
    precision: float | None
    k: int

    def lines(self) -> list[str]:
        """Format the report for people."""
        if self.precision is None:
            return ["the queries have no labels, so there is no precision"]
        return [f"{self.precision:.2%} of the {self.k} nearest neighbours are of the query's class"]

    def plain(self, queries: ImageDataset, bank: ImageDataset) -> dict[str, Any]:
        """Convert to what a report holds, with the names of images."""
        rows = []
        for place, query in enumerate(self.queries.tolist()):
            names = [printable(bank.names[n]) for n in self.neighbours[place].tolist()]
            values = [round(value, 4) for value in self.similarities[place].tolist()]
            rows.append({"query": printable(queries.names[query]), "neighbours": names, "similarities": values})
        return {"precision": self.precision, "k": self.k, "rows": rows}


def retrieve(
    queries: Features, bank: Features, *, rows: int = 8, k: int = 8, seed: int = 0, device: torch.device | str = "cpu"
) -> Retrieval:
    """Find the ``k`` nearest bank features; keep ``rows`` queries, drawn by ``seed``."""
    values, places = nearest_neighbours(queries.values.to(device), bank.values.to(device), k)
    values, places = values.cpu(), places.cpu()
    labelled = (queries.labels >= 0).nonzero().flatten()
    right = bank.labels[places[labelled]] == queries.labels[labelled, None]
    precision = right.double().mean().item() if len(labelled) else None
    order = torch.randperm(len(queries), generator=torch.Generator().manual_seed(seed))
    shown = order[:rows].sort().values
    return Retrieval(shown, places[shown], values[shown], precision, places.shape[1])


def save_sheet(path: Path, found: Retrieval, queries: ImageDataset, bank: ImageDataset) -> None:
    """Draw ``found`` into the PNG file ``path``. UserError if an image is unreadable."""
    width, row_height = (1 + found.k) * (_TILE + _GAP) + 2 * _GAP, _TILE + _LINE + _GAP
    sheet = Image.new("RGB", (width, len(found.queries) * row_height + _LINE + 2 * _GAP), _PAPER)
    pen, font = ImageDraw.Draw(sheet), ImageFont.load_default(size=_FONT_SIZE)

    def paste(row: int, column: int, dataset: ImageDataset, place: int, text: str, frame: str | None) -> None:
        left, top = _left(column), row * row_height + _LINE + 2 * _GAP
        picture = ImageOps.fit(dataset.image(place).decode(), (_TILE, _TILE), Image.Resampling.BICUBIC)
        if frame is not None:
            picture = ImageOps.expand(ImageOps.crop(picture, _FRAME), _FRAME, frame)
        sheet.paste(picture, (left, top))
        while text and font.getlength(text) > _TILE:
            text = text[:-1]
        pen.text((left, top + _TILE), text, _INK, font)

    pen.text((_GAP, _GAP), "query", _INK, font)
    heading = "nearest neighbours and their cosine similarity; green: the query's class"
    pen.text((_left(1), _GAP), heading, _INK, font)
    for row, query in enumerate(found.queries.tolist()):
        label = int(queries.labels[query])
        paste(row, 0, queries, query, _class_name(queries, label), None)
        for column, place in enumerate(found.neighbours[row].tolist()):
            other = int(bank.labels[place])
            frame = None if label < 0 or other < 0 else _RIGHT if label == other else _WRONG
            text = f"{found.similarities[row, column]:.3f} {_class_name(bank, other)}"
            paste(row, column + 1, bank, place, text, frame)
    with replacing(path) as temporary:
        sheet.save(temporary, format="PNG")


def _left(column: int) -> int:
    return _GAP + column * (_TILE + _GAP) + (_GAP if column else 0)


def _class_name(dataset: ImageDataset, label: int) -> str:
    return printable(dataset.classes[label]) if 0 <= label < len(dataset.classes) else ""


def evenly_spread(dataset: ImageDataset, limit: int) -> ImageDataset:
    """Choose at most ``limit`` images, evenly spaced, so that classes keep shares."""
    count = min(limit, len(dataset))
    return dataset.subset(np.linspace(0, len(dataset) - 1, count).round().astype(np.int64))
