"""Describe a data set: a table for the terminal and a contact sheet."""

from contextlib import suppress
from io import BytesIO
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from loaders.datasets.beton import is_beton, open_beton
from loaders.datasets.decode import ImageFault, decode_file, describe
from loaders.datasets.manifest import Record, read_folder_record
from loaders.errors import UserError
from loaders.prep.labels import names_digest
from loaders.prep.output import staged
from loaders.prep.source import Source
from loaders.text import printable

_COLUMNS, _ROWS, _TILE, _CAPTION = 10, 8, 96, 14  # of the sheet: counts, then pixels
_MEASURED = 200  # images whose pixels are looked at


def describe_source(source: Source) -> list[tuple[str, str]]:
    """List (heading, text) lines about a data set."""
    counts = np.bincount(source.labels[source.labels >= 0], minlength=len(source.classes))
    lines = [("data", f"{printable(source.path)} ({source.kind})"), ("images", f"{len(source):,}")]
    if len(counts):
        spread = f"{counts.min():,}" if counts.min() == counts.max() else f"{counts.min():,} to {counts.max():,}"
        examples = ", ".join(printable(name) for name in source.classes[:5]) + (", ..." if len(counts) > 5 else "")
        lines.append(("classes", f"{len(counts):,}, {spread} images each: {examples}"))
    unlabelled = int((source.labels < 0).sum())
    if unlabelled:
        lines.append(("no label", f"{unlabelled:,}"))
    if source.sizes is not None and len(source):
        sides = source.sizes.min(axis=1)
        height, width = source.sizes[source.sizes.prod(axis=1, dtype=np.int64).argmax()]
        lines.append(("shorter side", f"{sides.min()} to {sides.max()} pixels, median {np.median(sides):.0f}"))
        lines.append(("largest", f"{width} x {height} pixels"))
    if measured := _measure(source):
        lines.append(("pixels", measured))
    if source.faults:
        name, reason = source.faults[0]
        lines.append(("unusable", f"{len(source.faults):,}, such as {printable(name)}: {reason}"))
    lines.append(("names digest", names_digest(source)))
    record = _record(source.path)
    try:
        facts = _describe_record(record) if record else []
    except (KeyError, TypeError, ValueError, AttributeError):  # JSON, but not what cocor-prep writes
        facts = [("prepared", "by something else than cocor-prep: its facts are not understood")]
    return lines + [(heading, printable(text)) for heading, text in facts]


def _measure(source: Source) -> str:
    """Measure the pixels of some images, as flags of cocor-train; nothing if none can be read."""
    counts, images = np.zeros((3, 256)), 0  # how often each level occurs in R, G and B; every image counts alike
    for index in _spread(source, _MEASURED):
        with suppress(ImageFault, OSError):
            image = decode_file(BytesIO(source.locate(index).read()))
            counts += np.reshape(image.histogram(), (3, 256)) / (image.width * image.height)
            images += 1
    if not images:
        return ""
    grey = (counts == counts[0]).all()
    shares, levels = (counts[:1] if grey else counts) / images, np.arange(256) / 255
    mean = shares @ levels
    std = np.sqrt(np.maximum(shares @ levels**2 - mean**2, 1e-6))  # 0.001 is the least that cocor-train takes
    flags = [f"--{name} {','.join(f'{value:.3f}' for value in part)}" for name, part in (("mean", mean), ("std", std))]
    used = np.flatnonzero(counts.any(0))
    kind = "grey, --in-chans 1 " if grey else ""
    return f"{kind}{' '.join(flags)}, levels {used[0]} to {used[-1]} of 255 (of {images:,} images)"


def _spread(source: Source, most: int) -> list[int]:
    """Choose at most ``most`` images, spread evenly over the set."""
    return np.unique(np.linspace(0, len(source) - 1, min(len(source), most)).round().astype(int)).tolist()


def contact_sheet(source: Source, output: Path, force: bool = False) -> int:
    """Write a PNG of images spread evenly over the set; return their number."""
    if not len(source):
        raise UserError(f"{printable(source.path)}: no images to show")
    shown = _spread(source, _COLUMNS * _ROWS)
    rows = -(-len(shown) // _COLUMNS)
    sheet = Image.new("RGB", (_COLUMNS * (_TILE + 4), rows * (_TILE + _CAPTION + 4)), "white")
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(10)
    for place, index in enumerate(shown):
        x, y = place % _COLUMNS * (_TILE + 4) + 2, place // _COLUMNS * (_TILE + _CAPTION + 4) + 2
        label = source.labels[index]
        caption = printable(source.classes[label] if label >= 0 else source.names[index])
        draw.text((x, y + _TILE), caption.encode("latin-1", "replace").decode("latin-1")[:16], "black", font)
        try:
            image = decode_file(BytesIO(source.locate(index).read()))
        except (ImageFault, OSError) as fault:
            draw.text((x, y), describe(fault)[:16], "red", font)
            continue
        image.thumbnail((_TILE, _TILE))
        sheet.paste(image, (x + (_TILE - image.width) // 2, y + (_TILE - image.height) // 2))
    with staged(output, folder=False, force=force) as work:
        sheet.save(work, "PNG")
    return len(shown)


def _record(path: Path) -> Record | None:
    if is_beton(path):
        return open_beton(path).record
    return read_folder_record(path) if path.is_dir() else None


def _describe_record(record: Record) -> list[tuple[str, str]]:
    facts = record.facts
    settings, source = facts["settings"], facts["source"]
    resized = f"shorter side {settings['shorter_side']}" if settings["shorter_side"] else "sizes kept"
    how = "raw pixels" if settings["raw"] else f"JPEG, quality {settings['quality']} where encoded anew"
    treatments = ", ".join(f"{count:,} {name}" for name, count in facts["treatments"].items())
    skipped = f", {len(facts['skipped']):,} skipped" if facts["skipped"] else ""
    return [
        ("prepared", f"{resized}; {how}"),
        ("treatment", treatments + skipped),
        ("source", f"{source['name']} ({source['kind']}), digest {source['digest']}"),
    ]
