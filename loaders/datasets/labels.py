"""Labels: text files of them, ImageNet's own lists, the labelled split.

Names are relative to the data set's folder, "/" between folders; where a file of the same last name is unique, that
name alone will do (the published ImageNet lists have no folders). Suffixes of image files matter only where names
differ in nothing else, so that a list fits a folder and everything that was converted from it. Lines that start with #
are comments. Faults are named by line.
"""

import codecs
import csv
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from loaders.errors import UserError
from loaders.files import open_regular
from loaders.text import bare, printable

LARGEST_LIST = 1 << 30
"""Bytes: more than a list of the largest data sets takes."""

_HEADER_NAMES = frozenset({"file", "filename", "file_name", "image", "imageid", "name", "path"})
_LABEL_NAMES = frozenset({"label", "labels", "class", "class_name", "category", "target", "wnid"})
_SEPARATORS = ("\t", ";", ",")
_KAGGLE_HEADER = "ImageId,PredictionString"
_MOST_DIGITS = 9
_SPLIT_STREAM = 0xFFFFFFFE  # apart from every crop, view and order

_Way = Literal["whole", "class first", "last"]
_WAYS: tuple[_Way, ...] = get_args(_Way)


class NameLookup:
    """Find images by relative name or, where unique, last name, suffixes or not.

    ``label_of`` are the images' class names, if they have any: ``class/name`` then means the image ``name`` of a flat
    folder as well, since cocor-prep sorts such images into class folders (:func:`class_first`).
    """

    def __init__(self, names: Sequence[str], label_of: Sequence[str | None] = ()) -> None:
        self._names, self._label_of = names, label_of
        self._places: dict[tuple[_Way, bool], dict[str, int | None]] = {}

    def find(self, name: str) -> int | None:
        """Find the image's place, or None."""
        name = name.removeprefix("./")
        given = [name]
        if bare(name) != name:
            given.append(f"{name}.jpg")  # as cocor-prep names it if it is no JPEG's
        if bare(source := name.removesuffix(".jpg")) != source:
            given.append(source)
        for text in given:
            for way in _WAYS:
                place = self._by(way, False).get(text)
                if place is not None:
                    return place
        places = (self._by(way, True).get(bare(name)) for way in _WAYS)
        return next((place for place in places if place is not None), None)

    def _by(self, way: _Way, stripped: bool) -> dict[str, int | None]:
        """Index places by one kind of name."""
        if (way, stripped) not in self._places:
            kinds: dict[_Way, Iterable[str]] = {
                "whole": self._names,
                "class first": (class_first(*pair) for pair in zip(self._names, self._label_of, strict=False)),
                "last": (name.rpartition("/")[2] for name in self._names),
            }
            names = map(bare, kinds[way]) if stripped else kinds[way]
            self._places[way, stripped] = _unique(names)
        return self._places[way, stripped]


def class_first(name: str, label: str | None) -> str:
    """Name an image as a prepared set does: in the folder of its class, no other."""
    if label is not None and name.startswith(f"{label}/"):
        return name
    flat = name.replace("/", "_")
    return flat if label is None else f"{label}/{flat}"


def _unique(names: Iterable[str]) -> dict[str, int | None]:
    """Find the place of each name; None for those that occur more than once."""
    places: dict[str, int | None] = {}
    for place, name in enumerate(names):
        places[name] = None if name in places else place
    return places


def read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (number, text), with surrogate escapes, of lines that hold something."""
    with open_regular(path, "a text file") as file:
        if os.fstat(file.fileno()).st_size > LARGEST_LIST:
            raise UserError(f"{printable(path)}: too large for a list; give a text file with a line an image")
        text = file.read()
    if text.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise UserError(f"{printable(path)}: is UTF-16 text; save it as UTF-8")
    for number, line in enumerate(text.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        stripped = line.rstrip(b"\r").decode("utf-8", "surrogateescape")
        if stripped.strip() and not stripped.lstrip().startswith("#"):
            yield number, stripped


def read_labels(path: Path, names: Sequence[str]) -> tuple[dict[int, str], list[tuple[str, str]]]:
    """Read labels by image place, and (name, reason) of lines or images on their own.

    A line is ``name,label`` or ``name label``, with a tab or semicolon if need be, quoted as in CSV or not. A
    header line says which of several columns are meant; without one it is the first two between tabs. ImageNet's two
    official validation lists will do. A file without a label of any image is refused: no image is to blame for it.
    """
    lines = list(read_lines(path))
    official = _imagenet_labels(path, lines, names)
    labels, unknown = (official, []) if official is not None else _plain_labels(path, lines, names)
    if names and not labels:
        raise UserError(
            f"{printable(path)}: labels no image of the data set; write lines of 'name,label' "
            f"with names such as {printable(names[0])}"
        )
    missing = [(name, f"no label in {printable(path)}") for i, name in enumerate(names) if i not in labels]
    return labels, unknown + missing


def _plain_labels(
    path: Path, lines: Sequence[tuple[int, str]], names: Sequence[str]
) -> tuple[dict[int, str], list[tuple[str, str]]]:
    lookup = NameLookup(names)
    labels: dict[int, str] = {}
    unknown: list[tuple[str, str]] = []
    header = _header(path, lines, names)
    for number, line in lines[1:] if header else lines:
        fields = [(name.strip(), label.strip()) for name, label in _splits(line, header)]
        if not fields:
            raise UserError(f"{printable(path)}:{number}: no label; write 'name,label' or 'name label'")
        known = next(((place, label) for name, label in fields if (place := lookup.find(name)) is not None), None)
        if known is None:
            unknown.append((fields[0][0], f"labelled in {printable(path)}:{number}, but not there"))
            continue
        place, label = known
        if not label:
            raise UserError(f"{printable(path)}:{number}: empty label; write 'name,label' or 'name label'")
        if place in labels:
            raise UserError(f"{printable(path)}:{number}: {printable(names[place])} has a label already; keep one line")
        labels[place] = label
    return labels, unknown


class _Header(NamedTuple):
    """Separator of the columns, and the places of names and labels among them."""

    separator: str | None
    name: int
    label: int


def _header(path: Path, lines: Sequence[tuple[int, str]], names: Sequence[str]) -> _Header | None:
    """Read the first line as the columns' names; None if it is none."""
    number, line = lines[0] if lines else (0, "")
    for separator in (*_SEPARATORS, None):
        columns = [column.strip().lower() for column in _columns(line, separator)]
        name = next((i for i, column in enumerate(columns) if column in _HEADER_NAMES and column not in names), None)
        if name is None or len(columns) < 2:
            continue
        label = next((i for i, column in enumerate(columns) if column in _LABEL_NAMES and i != name), None)
        if label is None and len(columns) > 2:
            raise UserError(f"{printable(path)}:{number}: none of its columns is named class or label; rename that one")
        return _Header(separator, name, 1 - name if label is None else label)
    return None


def _splits(line: str, header: _Header | None) -> Iterator[tuple[str, str]]:
    """Yield ways to read a line as (name, label); names may hold blanks, commas."""
    if header is not None:
        columns = _columns(line, header.separator)
        if len(columns) > max(header.name, header.label):
            yield columns[header.name], columns[header.label]
    for separator in (*_SEPARATORS, None):
        parts = line.rsplit(separator, 1)
        if len(parts) == 2:
            yield parts[0].strip().strip('"'), parts[1].strip().strip('"')
    for separator in _SEPARATORS:
        columns = _columns(line, separator)
        if len(columns) == 2 or (len(columns) > 2 and separator == "\t"):  # Tiny ImageNet's list has boxes behind
            yield columns[0], columns[1]


def _columns(line: str, separator: str | None) -> list[str]:
    """Split a line of CSV, or at blanks; nothing if a field is too long."""
    if separator is None:
        return line.split()
    try:
        return next(csv.reader([line], delimiter=separator))
    except csv.Error:
        return []


def read_names(path: Path, names: Sequence[str], label_of: Sequence[str | None] = ()) -> list[int]:
    """Find the images listed in ``path``, one a line, as :class:`NameLookup` does."""
    lookup = NameLookup(names, label_of)
    line_of: dict[int, int] = {}
    for number, line in read_lines(path):
        found = lookup.find(line)
        place = lookup.find(line.strip()) if found is None else found
        if place is None:
            raise UserError(
                f"{printable(path)}:{number}: {printable(line.strip())} is not (or not uniquely) in the data set"
            )
        if place in line_of:
            raise UserError(
                f"{printable(path)}:{number}: {printable(names[place])} is listed already in line {line_of[place]}"
            )
        line_of[place] = number
    if not line_of:
        raise UserError(f"{printable(path)}: lists no images; write one name a line")
    return list(line_of)


def _imagenet_labels(path: Path, lines: Sequence[tuple[int, str]], names: Sequence[str]) -> dict[int, str] | None:
    """Read ImageNet's own lists: classes by image place; None if it is no such list.

    The competition site's ``LOC_val_solution.csv`` has names without suffix, the class first in a field of boxes. The
    development kit's ``ILSVRC2012_validation_ground_truth.txt`` has a number a line, in the order of the file names.
    """
    if lines and lines[0][1].strip() == _KAGGLE_HEADER:
        return _kaggle(path, lines[1:], names)
    if lines and all(text.strip().isdecimal() for _, text in lines):
        return _devkit(path, lines, names)
    return None


def _kaggle(path: Path, lines: Sequence[tuple[int, str]], names: Sequence[str]) -> dict[int, str]:
    places = {Path(name).stem: i for i, name in enumerate(names)}
    labels: dict[int, str] = {}
    for number, text in lines:
        name, _, boxes = text.partition(",")
        if not boxes.split():
            raise UserError(f"{printable(path)}:{number}: no class; expected 'name,class x y x y'")
        if name in places:
            labels[places[name]] = boxes.split()[0]
    return labels


def _devkit(path: Path, lines: Sequence[tuple[int, str]], names: Sequence[str]) -> dict[int, str]:
    if len(lines) != len(names):
        raise UserError(
            f"{printable(path)}: {len(lines):,} numbers for {len(names):,} images; "
            "a list without names needs one line an image"
        )
    # The numbers are the kit's own: taken for places among the sorted class names they leave an accuracy of 0.1 %.
    classes = _devkit_classes(path)
    labels: dict[int, str] = {}
    by_name = sorted(range(len(names)), key=lambda i: names[i])
    for (number, text), place in zip(lines, by_name, strict=True):
        digits = text.strip()
        if len(digits) > _MOST_DIGITS or int(digits) not in classes:
            raise UserError(f"{printable(path)}:{number}: {digits[:20]} is not a class number of meta.mat")
        labels[place] = classes[int(digits)]
    return labels


def _devkit_classes(path: Path) -> dict[int, str]:
    meta = path.parent / "meta.mat"
    if not meta.is_file():
        raise UserError(
            f"{printable(path)}: the development kit's numbers mean nothing without its meta.mat; "
            "put that beside this file, or use a list of 'name class' lines"
        )
    try:
        from scipy.io import loadmat
    except ImportError as fault:
        raise UserError(f"{printable(meta)}: reading it needs scipy: pip install scipy") from fault
    try:
        rows = loadmat(str(meta), squeeze_me=True)["synsets"]
        return {int(row["ILSVRC2012_ID"]): str(row["WNID"]) for row in rows}
    except Exception as fault:  # scipy raises many kinds on foreign files
        raise UserError(f"{printable(meta)}: not readable as the development kit's meta.mat ({fault})") from fault


def stratified_split(labels: npt.NDArray[np.int64], fraction: float, seed: int) -> npt.NDArray[np.int64]:
    """Choose ``fraction`` of every class in ``labels`` (N,): int64 (M,), ascending.

    Of a class of n images ``round(fraction * n)`` (half rounded up), at least one, are chosen: the first ones in an
    order that depends on ``seed`` and place alone, so that a smaller fraction's images are among a larger one's.
    """
    from loaders.views.philox import sort_keys  # loads numba, which commands that only read lists do without

    order = np.lexsort((sort_keys(seed, 0, len(labels), _SPLIT_STREAM), labels))
    classes, first, counts = np.unique(labels[order], return_index=True, return_counts=True)
    wanted = np.maximum(1, np.floor(fraction * counts + 0.5).astype(np.int64))
    known = classes >= 0
    taken = [order[start : start + count] for start, count in zip(first[known], wanted[known], strict=True)]
    return np.sort(np.concatenate(taken)).astype(np.int64) if taken else np.empty(0, np.int64)
