"""Scan a source: which images are fine, need repair or are unusable, and why.

Findings go to a JSON-lines report; names with undecodable bytes are escaped such that ``json.loads`` restores them.
"""

import itertools
import json
from collections import Counter
from contextlib import closing
from dataclasses import asdict, dataclass, field
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Literal, TextIO

from PIL import Image

from loaders.datasets import decode
from loaders.datasets.decode import ImageFault, decode_file, describe
from loaders.errors import no_fault_of_a_file
from loaders.prep.byte_ranges import Locator
from loaders.prep.encode import storable_header
from loaders.prep.pool import in_order, one_at_a_time
from loaders.prep.source import Source
from loaders.text import counted, printable

Status = Literal["good", "repair", "reject"]
_SHOWN = 12  # lines of each list on the screen
_SUFFIXES = {"JPEG": (".jpg", ".jpeg"), "MPO": (".jpg", ".jpeg"), "PNG": (".png",)}


@dataclass(frozen=True)
class Finding:
    """Finding in one image."""

    name: str
    status: Status  # can be stored as it is; reads well, but is not a plain upright JPEG; cannot be used
    format: str = ""
    height: int = 0
    width: int = 0
    notes: list[str] = field(default_factory=list)  # why it needs repair
    reason: str = ""  # why it cannot be used


@dataclass
class Summary:
    """Counts over a scan, and the rejected images."""

    statuses: Counter[str] = field(default_factory=Counter)
    notes: Counter[str] = field(default_factory=Counter)
    rejected: list[tuple[str, str]] = field(default_factory=list)
    largest: tuple[int, int, str] = (0, 0, "")  # height, width, name

    def add(self, finding: Finding) -> None:
        """Count a finding."""
        self.statuses[finding.status] += 1
        self.notes.update(finding.notes)
        if finding.status == "reject":
            self.rejected.append((finding.name, finding.reason))
        elif finding.height * finding.width > self.largest[0] * self.largest[1]:
            self.largest = (finding.height, finding.width, finding.name)


def scan(source: Source, max_pixels: int, workers: int | None, stop: bool, report: TextIO | None) -> Summary:
    """Decode every image, report the findings, ``stop`` at an unusable image."""
    summary = Summary()
    examined = in_order(
        partial(_examine_named, max_pixels=max_pixels), lambda i: (source.origin(i), source.locate(i)),
        len(source), workers, name=source.origin, doing="scanning",
    )  # fmt: skip
    known = (Finding(name, "reject", reason=reason) for name, reason in source.faults)
    with closing(examined):
        for finding in itertools.chain(known, examined):
            if report is not None:
                report.write(json.dumps(asdict(finding)) + "\n")
            summary.add(finding)
            if finding.status == "reject" and stop:
                break
    return summary


def print_summary(source: Source, summary: Summary) -> None:
    """Print one screen on what a scan found."""
    total = sum(summary.statuses.values())
    classes = counted(len(source.classes), "class")
    unlabelled = int((source.labels < 0).sum())
    without = f", {unlabelled:,} without a class" if unlabelled else ""
    print(f"{printable(source.path)} ({source.kind}): {counted(total, 'image')}, {classes}{without}")
    print(f"  {summary.statuses['good']:,} good: upright JPEGs, stored as they are")
    print(f"  {summary.statuses['repair']:,} to repair: readable; cocor-prep convert stores them as upright RGB JPEGs")
    for note, count in summary.notes.most_common(_SHOWN):
        print(f"      {count:,} {note}")
    print(f"  {summary.statuses['reject']:,} unusable")
    for name, reason in summary.rejected[:_SHOWN]:
        print(f"      {printable(name)}: {reason}")
    if len(summary.rejected) > _SHOWN:
        print(f"      and {len(summary.rejected) - _SHOWN:,} more; --report FILE lists all")
    if source.hidden:
        print(f"  {source.hidden:,} hidden files and folders were passed over")
    height, width, name = summary.largest
    if name:
        print(f"  largest: {width} x {height} pixels, {printable(name)}")


def _examine_named(image: tuple[str, Locator], max_pixels: int) -> Finding:
    return examine(*image, max_pixels)


def examine(name: str, place: Locator, max_pixels: int) -> Finding:
    """Read and decode one image."""
    data = b""
    try:
        data = place.read()
        header = storable_header(data, max_pixels)
        with one_at_a_time(header.height * header.width):
            decode_file(BytesIO(data))
        with Image.open(BytesIO(data)) as image:
            kind = image.format or ""
            notes = [] if header.upright_jpeg else _notes(name, image)
    except (ImageFault, OSError) as fault:
        if no_fault_of_a_file(fault):
            raise
        return Finding(name, "reject", reason=_reason(data, describe(fault)))
    except MemoryError:
        return Finding(name, "reject", reason="too large for this machine's memory")
    return Finding(name, "good" if header.upright_jpeg else "repair", kind, header.height, header.width, notes)


def _notes(name: str, image: Image.Image) -> list[str]:
    """List why an image is no plain, upright JPEG."""
    kind = image.format or "unknown format"
    jpeg = kind in ("JPEG", "MPO")
    notes = [] if jpeg else [kind]
    suffix = Path(name).suffix.lower()
    if suffix and suffix not in _SUFFIXES.get(kind, (suffix,)):
        notes.append(f"{kind} named {suffix}")
    orientation = decode.orientation_of(image)
    if orientation > 1:
        notes.append(f"EXIF orientation {orientation}")
    cmyk = "CMYK" if image.info.get("adobe_transform") != 2 else "YCCK"
    modes = {"CMYK": cmyk, "YCCK": cmyk, "P": "palette", "1": "black and white"}
    named = modes.get(image.mode, "16-bit grey" if image.mode.startswith("I") else "")
    notes += [named] if named else []
    if image.has_transparency_data:
        notes.append("transparency")
    return notes or ["JPEG stored as RGB" if jpeg else f"{kind} {image.mode}"]


def _reason(data: bytes, reason: str) -> str:
    """Return what a file is if it is clearly no image, else ``reason``."""
    start = data[:256].lstrip().lower()
    if start.startswith((b"<!doctype html", b"<html", b"<?xml", b"<head")):
        return "a web page or XML, not an image"
    return reason
