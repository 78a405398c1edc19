"""Looking at every image of a source: which are fine, which need repair, which are unusable, and why.

Each image is decoded completely, in worker processes with bounded memory. The findings go to a JSON-lines report, one
image a line; names with undecodable bytes are escaped there in such a way that ``json.loads`` gives them back.
"""

import json
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import asdict, dataclass, field
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Literal, TextIO

from PIL import ExifTags, Image

from loaders.datasets.decode import ImageFault, decode_file, describe, exif_segments, has_stray_bytes, read_header
from loaders.lacking import no_fault_of_a_file
from loaders.prep.byte_ranges import Locator
from loaders.prep.convert import CHUNK
from loaders.prep.pool import in_order, one_at_a_time
from loaders.prep.source import Source
from loaders.progress import track
from loaders.text import available_cores, printable

Status = Literal["good", "repair", "reject"]
_SHOWN = 12  # lines of each list on the screen
_SUFFIXES = {"JPEG": (".jpg", ".jpeg"), "MPO": (".jpg", ".jpeg"), "PNG": (".png",)}


@dataclass(frozen=True)
class Finding:
    """What was found in one image.

    ``status``: "good" can be stored as it is, "repair" reads well but is not a plain upright JPEG (``notes`` say why;
    cocor-prep convert re-encodes it), "reject" cannot be used (``reason``).
    """

    name: str
    status: Status
    format: str = ""
    height: int = 0
    width: int = 0
    notes: list[str] = field(default_factory=list)
    reason: str = ""


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


def scan(
    source: Source, max_pixels: int, workers: int | None, stop: bool, report: Callable[[Finding], None]
) -> Summary:
    """Decode every image of ``source``; each finding goes to ``report``. ``stop``: end at the first unusable one."""
    summary = Summary()
    with closing(_findings(source, max_pixels, workers or available_cores())) as findings:
        for finding in findings:
            report(finding)
            summary.add(finding)
            if finding.status == "reject" and stop:
                break
    return summary


def write_finding(file: TextIO | None, finding: Finding) -> None:
    """Append a line to a JSON-lines report, in ASCII; without a file, do nothing."""
    if file is not None:
        file.write(json.dumps(asdict(finding)) + "\n")


def print_summary(source: Source, summary: Summary) -> None:
    """One screen on what a scan found."""
    total = sum(summary.statuses.values())
    print(f"{printable(source.path)} ({source.kind}): {total:,} images, {len(source.classes):,} classes")
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


def _findings(source: Source, max_pixels: int, workers: int) -> Generator[Finding, None, None]:
    for name, reason in source.faults:
        yield Finding(name, "reject", reason=reason)
    starts = range(0, len(source), CHUNK)
    tasks = (
        [(source.names[i], source.locate(i)) for i in range(start, min(start + CHUNK, len(source)))] for start in starts
    )
    results = in_order(
        partial(examine_all, max_pixels=max_pixels),
        tasks,
        max(1, min(workers, len(starts))),
        lambda task: printable(source.names[starts[task]]),
    )
    with closing(results):
        for findings in track(results, len(source), "scanning", "images", CHUNK):
            yield from findings


def examine_all(images: list[tuple[str, Locator]], max_pixels: int) -> list[Finding]:
    """:func:`examine` for several images: a worker's task."""
    return [examine(name, place, max_pixels) for name, place in images]


def examine(name: str, place: Locator, max_pixels: int) -> Finding:
    """Read and decode one image."""
    data = b""
    try:
        data = place.read()
        header = read_header(BytesIO(data))
        if header.height * header.width > max_pixels:
            raise ImageFault(f"{header.width} x {header.height} pixels are more than the limit of {max_pixels:,}")
        with one_at_a_time(header.height * header.width):
            decode_file(BytesIO(data))
        with Image.open(BytesIO(data)) as image:
            kind = image.format or ""
            notes = [] if header.upright_jpeg else _notes(name, image, data)
    except (ImageFault, OSError) as fault:
        if no_fault_of_a_file(fault):
            raise
        return Finding(name, "reject", reason=_reason(data, describe(fault)))
    except MemoryError:
        return Finding(name, "reject", reason="too large for this machine's memory")
    return Finding(name, "good" if header.upright_jpeg else "repair", kind, header.height, header.width, notes)


def _notes(name: str, image: Image.Image, data: bytes) -> list[str]:
    """Why an image, whose file is ``data``, is no plain, upright JPEG."""
    kind = image.format or "unknown format"
    jpeg = kind in ("JPEG", "MPO")
    notes = [] if jpeg else [kind]
    suffix = Path(name).suffix.lower()
    if suffix and suffix not in _SUFFIXES.get(kind, (suffix,)):
        notes.append(f"{kind} named {suffix}")
    orientation = Image.Image.getexif(image).get(ExifTags.Base.Orientation, 1)
    if orientation != 1:
        notes.append(f"EXIF orientation {orientation}")
    if exif_segments(image) > 1:
        notes.append("several EXIF segments")
    if jpeg and has_stray_bytes(BytesIO(data)):
        notes.append("stray bytes between JPEG segments")
    if image.mode in ("CMYK", "YCCK"):
        notes.append("CMYK" if image.info.get("adobe_transform") != 2 else "YCCK")
    elif image.mode.startswith("I"):
        notes.append("16-bit grey")
    elif image.mode == "P":
        notes.append("palette")
    elif image.mode == "1":
        notes.append("black and white")
    if image.has_transparency_data:
        notes.append("transparency")
    return notes or ["JPEG stored as RGB" if jpeg else f"{kind} {image.mode}"]


def _reason(data: bytes, reason: str) -> str:
    """``reason``, or what the file is instead of an image, if its first bytes show that."""
    start = data[:256].lstrip().lower()
    if start.startswith((b"<!doctype html", b"<html", b"<?xml", b"<head")):
        return "a web page or XML, not an image"
    return reason
