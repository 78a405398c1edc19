"""Draw views.png: what the network really sees of the first images of a batch.

Columns are the original, the contrastive views and the composites; under each composite stands its composition, the
basic augmentations that it is made of. Looking at this picture finds more mistakes in a recipe than any log.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from loaders.batch import Batch
from loaders.files import replacing
from loaders.views.ops import BASIC

_LEAST_TILE = 144  # pixels; smaller images are enlarged by a whole factor
_GAP, _FONT_SIZE, _LINE = 8, 13, 16
_INK, _PAPER = "black", "white"


def save_view_sheet(
    batch: Batch, path: Path, mean: Sequence[float], std: Sequence[float], *, images: int = 8
) -> None:  # fmt: skip
    """Draw the first ``images`` samples of ``batch`` into the PNG file ``path``.

    ``mean`` and ``std`` are those by which its images are normalised.

    Raises:
        UserError: the file cannot be written.
    """
    shift, scale = (torch.tensor(values).view(-1, 1, 1) for values in (mean, std))
    sheet = _draw(_columns(batch, min(images, len(batch.index)), shift, scale))
    with replacing(path) as temporary:
        sheet.save(temporary, format="PNG")


def _columns(
    batch: Batch, count: int, mean: Tensor, std: Tensor
) -> list[tuple[str, list[tuple[Image.Image, str]]]]:  # fmt: skip
    """Return (title, [(picture, caption) of each sample]) of every column."""
    labels = zip(batch.index.tolist(), batch.label.tolist(), strict=True)
    names = [f"image {index}" if label < 0 else f"image {index}, class {label}" for index, label in labels][:count]
    columns: list[tuple[str, Tensor, list[str]]] = []
    if originals := len(batch.original) // len(batch.index):
        title = "original" if originals == 1 else f"original (1 of {originals})"
        columns.append((title, batch.original, names))
    for number, views in enumerate(batch.views, start=1):
        columns.append((f"view {number}", views, [""] * count if columns else names))
    for views, compositions in zip(batch.composites, batch.composition, strict=True):
        title = f"composite, length {int(compositions[0].sum())}"
        columns.append((title, views, [describe(composition) for composition in compositions[:count]]))
    return [
        (title, [(_picture(view * std + mean), text) for view, text in zip(shown, captions, strict=True)])
        for title, views, captions in columns
        for shown in [views[:count].detach().float().cpu()]
    ]


def describe(composition: Tensor) -> str:
    """Put a composition vector (14,) into words: ``Rotate, Color x2``."""
    counts = {op.label: count for op, count in zip(BASIC, composition.tolist(), strict=True) if count}
    return ", ".join(label if count == 1 else f"{label} x{count}" for label, count in counts.items())


def _picture(pixels: Tensor) -> Image.Image:
    levels = (pixels.clamp(0, 1) * 255).round().to(torch.uint8).expand(3, -1, -1).permute(1, 2, 0)
    image = Image.fromarray(levels.contiguous().numpy())
    factor = -(-_LEAST_TILE // max(image.size))
    return image.resize((image.width * factor, image.height * factor), Image.Resampling.NEAREST)


def _draw(columns: list[tuple[str, list[tuple[Image.Image, str]]]]) -> Image.Image:
    font = ImageFont.load_default(size=_FONT_SIZE)
    tile = columns[0][1][0][0].width
    wrapped = [(title, [(picture, _wrap(text, tile, font)) for picture, text in cells]) for title, cells in columns]
    lines = max(len(caption) for _, cells in wrapped for _, caption in cells)
    row_height = tile + lines * _LINE + 2 * _GAP
    width = len(columns) * (tile + _GAP) + _GAP
    height = 2 * _GAP + _LINE + len(columns[0][1]) * row_height
    sheet = Image.new("RGB", (width, height), _PAPER)
    pen = ImageDraw.Draw(sheet)
    for column, (title, cells) in enumerate(wrapped):
        left = _GAP + column * (tile + _GAP)
        pen.text((left, _GAP), title, _INK, font)
        for row, (picture, caption) in enumerate(cells):
            top = 2 * _GAP + _LINE + row * row_height
            sheet.paste(picture, (left, top))
            for number, line in enumerate(caption):
                pen.text((left, top + tile + 2 + number * _LINE), line, _INK, font)
    return sheet


def _wrap(text: str, width: int, font: Any) -> list[str]:
    """Break ``text`` at its commas into lines no wider than ``width`` pixels where possible."""
    lines: list[str] = []
    for part in text.split(", "):
        longer = f"{lines[-1]}, {part}" if lines else part
        if lines and font.getlength(longer) <= width:
            lines[-1] = longer
        else:
            lines.append(part)
    return lines
