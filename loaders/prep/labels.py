"""Label splits as text files: which few images count as labelled.

The choice is :func:`loaders.datasets.labels.stratified_split`'s, so ``cocor-train`` chooses the same images by itself.
After comment lines follows one relative name a line. Digests in the comments show later edits, and whether the list
was written for this data set. A list fits a folder and everything that was converted from it.
"""

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from loaders.datasets.labels import read_names, stratified_split
from loaders.errors import UserError
from loaders.prep.output import staged
from loaders.prep.source import Source
from loaders.text import bare, printable

_DIGEST, _DATA = b"# sha256 of the names: ", b"# sha256 of the data set's names and labels: "


@dataclass(frozen=True)
class Checked:
    """List that fits a data set: its images, those of each class, and remarks."""

    images: int
    per_class: npt.NDArray[np.int64]
    remarks: list[str]


def write_labels(source: Source, fraction: float, seed: int, output: Path, force: bool = False) -> int:
    """Write a split and return its number of images. UserError without labels."""
    if not (source.labels >= 0).any():
        raise UserError(f"{printable(source.path)}: has no labels; give class folders, or --labels with a label file")
    order = np.array(source.order(), np.int64)  # the order in which training sees them
    chosen = [source.names[order[i]] for i in stratified_split(source.labels[order], fraction, seed)]
    broken = next((name for name in chosen if "\n" in name or "\r" in name), None)
    if broken is not None:
        raise UserError(f"{printable(source.path / broken)}: its name does not fit into a line of text; rename it")
    body = b"".join(map(_line, chosen))
    head = [
        b"# Label split by cocor-prep, one image a line",
        f"# fraction {fraction:g}, seed {seed}: {len(chosen)} of {len(source)} images".encode(),
        _DATA + names_digest(source).encode(),
        _DIGEST + hashlib.sha256(body).hexdigest().encode(),
    ]
    with staged(output, folder=False, force=force) as work:
        work.write_bytes(b"\n".join(head) + b"\n" + body)
    return len(chosen)


def check_labels(path: Path, source: Source) -> Checked:
    """Check a list, written by cocor-prep or not, against a data set.

    UserError naming the line of an image that is unknown, doubled or without label, or if a digest shows later edits.
    """
    places = np.array(read_names(path, source.names), np.int64)  # named class first
    lines = path.read_bytes().splitlines(keepends=True)
    stated = {
        key: line[len(key) :].strip().decode() for line in lines for key in (_DIGEST, _DATA) if line.startswith(key)
    }
    body = b"".join(line for line in lines if not line.startswith(b"#"))
    if _DIGEST in stated and stated[_DIGEST] != hashlib.sha256(body).hexdigest():
        raise UserError(f"{printable(path)}: names were changed after it was written (digest differs); write it again")
    unlabelled = places[source.labels[places] < 0]
    if len(unlabelled):
        raise UserError(f"{printable(path)}: {printable(source.names[unlabelled[0]])} has no label in the data set")
    per_class = np.bincount(source.labels[places], minlength=len(source.classes))
    remarks = []
    if _DIGEST not in stated:
        remarks.append("no digest in its head: later changes cannot be seen")
    if _DATA in stated and stated[_DATA] != names_digest(source):
        remarks.append("written for a data set with other names or labels, though all its images are here")
    empty = [source.classes[i] for i in np.flatnonzero(per_class == 0)]
    if empty:
        remarks.append(f"no image of {len(empty)} of the {len(source.classes)} classes, such as {printable(empty[0])}")
    return Checked(len(places), per_class, remarks)


def _line(name: str) -> bytes:
    return (b"./" if name.lstrip().startswith("#") else b"") + os.fsencode(name) + b"\n"


def names_digest(source: Source) -> str:
    """Compute SHA-256 over names and labels, which survive conversion.

    It is made of the classes, and of "name NUL class" of every image in sorted order, names without image suffixes.
    """
    digest = hashlib.sha256("\0".join(source.classes).encode("utf-8", "surrogateescape") + b"\0\0")
    of = [source.classes[label] if label >= 0 else "" for label in source.labels]
    for line in sorted(os.fsencode(f"{bare(name)}\0{label}\0") for name, label in zip(source.names, of, strict=True)):
        digest.update(line)
    return digest.hexdigest()
