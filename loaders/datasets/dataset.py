"""Data set of image files: their names, labels and sizes, as plain arrays.

``open_folder`` accepts class folders (``root/class/.../image``) and flat folders with or without a label file, and Tiny
ImageNet as it is distributed. Text files beside the images are passed over. Classes are sorted as plain text, so "10"
comes before "2"; a class's label is its place in that order.
"""

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt

from loaders.cpus import available_cores
from loaders.datasets.bad_samples import BadSamples
from loaders.datasets.decode import EncodedImage, ImageFile
from loaders.datasets.folder import Listing, list_folder
from loaders.datasets.labels import read_labels, read_names
from loaders.datasets.layout import refuse_shards, refuse_what_is_no_class, tiny_imagenet_labels, without_texts
from loaders.datasets.size_index import size_index
from loaders.errors import UserError
from loaders.text import printable

OnError = Literal["stop", "skip"]
SHARED: dict[str, bool] = {"shared": True}  # metadata of a field that has no value per image


@dataclass(frozen=True, eq=False)
class ImageDataset:
    """N images below ``root``.

    - ``names``: file names relative to ``root``, with surrogate escapes for undecodable bytes.
    - ``labels`` int64 (N,): place in ``classes``, -1 where there is none.
    - ``sizes`` int32 (N, 2): height and width of the upright image in pixels.
    - ``plain`` bool (N,): whether decoders other than Pillow give Pillow's pixels (see :mod:`loaders.datasets.decode`).
    - ``skipped``: (name, reason) of the files left out.
    - ``file_sizes`` int64 (N,): bytes of every file when the set was opened, by which DALI's loader sees that one has
      changed; None for images that are no files of their own.
    - ``file_times`` int64 (N,): when they were modified, in nanoseconds.
    - ``bad_samples``: problems that loaders have met since; shared with subsets.
    """

    root: Path = field(metadata=SHARED)
    names: list[str]
    labels: npt.NDArray[np.int64]
    classes: list[str] = field(metadata=SHARED)
    sizes: npt.NDArray[np.int32]
    plain: npt.NDArray[np.bool_]
    skipped: tuple[tuple[str, str], ...] = field(default=(), metadata=SHARED)
    file_sizes: npt.NDArray[np.int64] | None = None
    file_times: npt.NDArray[np.int64] | None = None
    bad_samples: BadSamples = field(default_factory=BadSamples, kw_only=True, metadata=SHARED)

    def __post_init__(self) -> None:
        lengths = {name: len(column) for name, column in self._columns().items() if column is not None}
        if any(length != len(self.names) for length in lengths.values()):
            raise ValueError(f"fields of different lengths: {lengths}")

    def _columns(self) -> dict[str, Any]:
        """Collect the fields with a value per image."""
        return {part.name: getattr(self, part.name) for part in fields(self) if not part.metadata.get("shared")}

    def __len__(self) -> int:
        return len(self.names)

    @cached_property
    def paths(self) -> list[str]:
        """Return the absolute paths of the files."""
        root = self.root.absolute()
        return [f"{root}/{name}" for name in self.names]

    @cached_property
    def digest(self) -> str:
        """Digest (SHA-256) names, labels, classes and sizes, wherever the images lie."""
        digest = hashlib.sha256("\0".join(self.classes).encode("utf-8", "surrogateescape"))
        digest.update(b"\0\0" + b"\0".join(os.fsencode(name) for name in self.names) + b"\0")
        digest.update(np.ascontiguousarray(self.labels).tobytes() + np.ascontiguousarray(self.sizes).tobytes())
        return digest.hexdigest()

    def image(self, index: int) -> EncodedImage:
        """Say where image ``index`` is; its ``decode`` gives the pixels."""
        height, width = self.sizes[index].tolist()
        return ImageFile(self.paths[index], (width, height))

    def subset(self, indices: Sequence[int] | npt.NDArray[np.integer]) -> Self:
        """Take the images ``indices`` in that order, with the same classes."""
        chosen = np.asarray(indices, np.int64)
        columns = self._columns()
        for name, column in columns.items():
            if column is not None:
                columns[name] = [column[i] for i in chosen] if isinstance(column, list) else column[chosen]
        return replace(self, skipped=(), **columns)

    def joined(self, other: Self) -> Self:
        """Join two subsets of one data set. What is not per image is the first's."""
        columns, others = self._columns(), other._columns()
        for name, column in columns.items():
            if column is None or others[name] is None:
                columns[name] = None
            else:
                other_list = isinstance(column, list)
                columns[name] = column + others[name] if other_list else np.concatenate([column, others[name]])
        return replace(self, **columns)


def open_folder(
    path: str | os.PathLike[str], labels: str | os.PathLike[str] | None = None, on_error: OnError = "stop",
    workers: int | None = None, *, classes: Sequence[str] | None = None, allow_empty: bool = False,
    quiet: bool = False
) -> ImageDataset:  # fmt: skip
    """Open a folder of images.

    ``labels`` names a text file for folders without class folders (see :func:`loaders.datasets.labels.read_labels`).
    ``on_error``: "stop" raises at the first file that is not a usable image, "skip" leaves such files out and lists
    them in ``skipped``. ``classes`` fixes the classes, such as the training set's for a validation set; label files may
    then hold places instead of names. ``allow_empty`` accepts class folders without images, keeping their label.
    Raises :class:`UserError`.
    """
    root = Path(path)
    labels = tiny_imagenet_labels(root) if labels is None else labels
    listing = _list(root, labels, quiet)
    index = size_index(root, listing, workers or available_cores(), quiet)
    label_of, faults = _labels(listing, labels)
    faults |= dict(listing.faults) | {listing.names[i]: reason for i, reason in index.faults.items()}
    if faults and on_error == "stop":
        _refuse(root, faults)
    chosen = [i for i, name in enumerate(listing.names) if name not in faults]
    if not chosen:
        raise UserError(f"{printable(root)}: no usable images; check the path")
    folders = listing.folders if labels is None else []
    found = [label_of.get(i) for i in chosen]
    known, numbers = number_classes(root, found, folders, classes, allow_empty, listed=labels is not None)
    names, skipped = [listing.names[i] for i in chosen], tuple(sorted(faults.items()))
    file_sizes, mtimes = (np.array(values, np.int64)[chosen] for values in (listing.sizes, listing.mtimes))
    sizes, plain = index.sizes[chosen], index.plain[chosen]
    return ImageDataset(root, names, numbers, known, sizes, plain, skipped, file_sizes, mtimes)


def read_label_split(path: str | os.PathLike[str], dataset: ImageDataset) -> npt.NDArray[np.int64]:
    """Find the images listed in a text file, one a line: int64 (M,), in its order.

    A list made for another form of the same images will do (see :class:`loaders.datasets.labels.NameLookup`). Every
    listed image must have a label. Raises :class:`UserError` naming file and line.
    """
    label_of = [dataset.classes[label] if label >= 0 else None for label in dataset.labels]
    places = np.array(read_names(Path(path), dataset.names, label_of), np.int64)
    unlabelled = places[dataset.labels[places] < 0]
    if len(unlabelled):
        raise UserError(f"{printable(path)}: {printable(dataset.names[unlabelled[0]])} has no label in the data set")
    return places


def _list(root: Path, labels: str | os.PathLike[str] | None, quiet: bool) -> Listing:
    if not root.exists():
        raise UserError(f"{printable(root)}: no such folder; check the path")
    if not root.is_dir():
        refuse_shards(root, [root.name])
        raise UserError(f"{printable(root)}: not a folder; give the folder that holds the images")
    listing = list_folder(str(root))
    if labels is not None:  # the label file may lie beside the images
        real, last = os.path.realpath(labels), Path(labels).name
        keep = [i for i, n in enumerate(listing.names) if Path(n).name != last or os.path.realpath(root / n) != real]
        listing = listing.take(keep)
    if not listing.names and not listing.faults:
        raise UserError(f"{printable(root)}: an empty folder; check the path")
    listing = listing.take(without_texts(root, listing.names, quiet))
    for name, reason in listing.faults:
        if name in (".", *listing.folders):  # skipping it would skip a class
            raise UserError(f"{printable(root / name)}: {reason}; make this folder readable, or hide or remove it")
    refuse_shards(root, listing.names)
    if labels is None:
        refuse_what_is_no_class(root, listing)
    return listing


def _labels(listing: Listing, path: str | os.PathLike[str] | None) -> tuple[dict[int, str], dict[str, str]]:
    """Find labels by image place, and faults by name: labels or images on their own."""
    names = listing.names
    if path is not None:
        labels, faults = read_labels(Path(path), names)
        return labels, dict(faults)
    if listing.folders:
        labels = {i: name.partition("/")[0] for i, name in enumerate(names) if "/" in name}
        return labels, {name: "outside every class folder" for name in names if "/" not in name}
    return {}, {}


def _refuse(root: Path, faults: dict[str, str]) -> None:
    name = min(faults)
    others = f" (and {len(faults) - 1:,} more such files)" if len(faults) > 1 else ""
    raise UserError(f"{printable(root / name)}: {faults[name]}{others}; remove it, or pass --on-error skip")


def number_classes(
    root: Path, found: list[str | None], folders: list[str], classes: Sequence[str] | None, allow_empty: bool,
    listed: bool = False
) -> tuple[list[str], npt.NDArray[np.int64]]:  # fmt: skip
    """Return the classes, and each image's place among them (-1 for None).

    ``folders`` are classes even without images. Labels match ``classes`` by name, where numbers may differ in leading
    zeros; if ``listed`` in a file, and no class is called by a number, numbers are places. UserError for unknown ones.
    """
    present = {label for label in found if label is not None}
    empty = [folder for folder in folders if folder not in present]
    if empty and not allow_empty:
        raise UserError(
            f"{printable(root / empty[0])}: a class folder without images; remove it (cocor-prep convert --allow-empty "
            "keeps it as a class)"
        )
    known = list(classes) if classes is not None else sorted(present.union(folders))
    # cocor-prep pads the numbers of a set to the width of its own largest one.
    same = unpadded if all(len(set(map(unpadded, names))) == len(names) for names in (known, present)) else str
    places = {same(name): i for i, name in enumerate(known)}
    strange = sorted(label for label in present if same(label) not in places)
    if strange and listed and all(map(_is_number, present)) and not any(map(_is_number, known)):
        places = {same(label): int(label) for label in present}
        strange = [label for label in strange if int(label) >= len(known)]
    if strange:
        raise UserError(f"{printable(root)}: class {printable(strange[0])} is not among the {len(known)} known classes")
    return known, np.array([-1 if label is None else places[same(label)] for label in found], np.int64)


def _is_number(label: str) -> bool:
    return label.isdecimal() and len(label) < 10


def unpadded(label: str) -> str:
    """Drop the leading zeros of a class that is called by a number."""
    return str(int(label)) if _is_number(label) else label
