"""Source of images, whatever its form: names, labels, classes and locators."""

import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path

import numpy as np
import numpy.typing as npt

from loaders.datasets.folder import is_hidden, sort_key
from loaders.datasets.labels import class_first, read_labels, read_lines
from loaders.errors import UserError
from loaders.prep.byte_ranges import Locator
from loaders.text import printable, stays_inside

CLASS_LISTS = {"imagenet100": "imagenet100.txt"}
LONGEST_NAME = 255  # bytes, of a file or folder
_MOST_DIGITS = 20  # of a class number


@dataclass(frozen=True, eq=False)
class Source:
    """N images and where they lie."""

    path: Path
    kind: str
    names: list[str]  # relative, class first
    labels: npt.NDArray[np.int64]  # (N,): place in ``classes`` or -1
    classes: list[str]
    faults: list[tuple[str, str]]  # (name, reason) of what is already known to be unusable
    locate: Callable[[int], Locator]  # where image i's bytes are
    origins: Sequence[str] = ()  # names in the source itself, if they are others
    sizes: npt.NDArray[np.int32] | None = None  # (N, 2): height and width of the upright images, if known
    hidden: int = 0  # files and folders that were passed over, if counted
    in_order: bool = False  # images already have the order in which training sees them

    def __len__(self) -> int:
        return len(self.names)

    def origin(self, index: int) -> str:
        """Return the image's name in the source itself."""
        return (self.origins or self.names)[index]

    def order(self) -> list[int]:
        """List image indices in the order of training: by name unless ``in_order``."""
        if self.in_order:
            return list(range(len(self)))
        return sorted(range(len(self)), key=lambda i: sort_key(self.names[i]))

    def keep_classes(self, wanted: Sequence[str]) -> "Source":
        """Select and renumber classes. UserError for an unknown one."""
        unknown = sorted(set(wanted) - set(self.classes))
        if unknown:
            more = f" (nor {len(unknown) - 1} more of the list)" if len(unknown) > 1 else ""
            raise UserError(f"{printable(self.path)}: has no class {printable(unknown[0])}{more}")
        classes = sorted(set(wanted))
        places = {name: i for i, name in enumerate(classes)}
        new = np.array([places.get(name, -1) for name in self.classes] + [-1], np.int64)[self.labels]
        chosen = np.flatnonzero(new >= 0)
        locate = self.locate
        kept = [(name, reason) for name, reason in self.faults if name.partition("/")[0] in places or "/" not in name]
        return replace(
            self,
            names=[self.names[i] for i in chosen],
            labels=new[chosen],
            classes=classes,
            faults=kept,
            locate=lambda i: locate(int(chosen[i])),
            origins=[self.origins[i] for i in chosen.tolist()] if self.origins else (),
            sizes=None if self.sizes is None else self.sizes[chosen],
        )


def read_classes(name: str) -> list[str]:
    """Read a shipped list of classes, or the first word of each line of a file."""
    if name in CLASS_LISTS:
        text = resources.files("loaders.prep").joinpath(CLASS_LISTS[name]).read_text()
        return [line for line in text.split("\n") if line and not line.startswith("#")]
    if not Path(name).is_file():
        raise UserError(f"{printable(name)}: no such list of classes; name a text file, or {', '.join(CLASS_LISTS)}")
    line_of: dict[str, int] = {}
    for number, line in read_lines(Path(name)):
        wanted = line.split()[0]
        if wanted in line_of:
            again = f"{printable(wanted)} is listed already in line {line_of[wanted]}"
            raise UserError(f"{printable(name)}:{number}: {again}")
        line_of[wanted] = number
    if not line_of:
        raise UserError(f"{printable(name)}: lists no classes; write one a line")
    return list(line_of)


def labels_from_list(
    path: str | Path, names: Sequence[str]
) -> tuple[list[int], list[str | None], list[tuple[str, str]]]:
    """Read a label file: places of its images, their labels, and faults."""
    found, faults = read_labels(Path(path), names)
    places = sorted(found)
    return places, [found[i] for i in places], faults


def make_source(
    path: Path, kind: str, names: Sequence[str], label_of: Sequence[str | None], faults: list[tuple[str, str]],
    locate: Callable[[int], Locator], classes: Sequence[str] = (), origins: Sequence[str] = (),
) -> Source:  # fmt: skip
    """Make a source from class names instead of numbers.

    Images are named class first. ``classes`` may add empty ones; ``origins`` are the names in the source itself.
    """
    if not names and not faults:
        raise UserError(f"{printable(path)}: holds no images; check the path")
    known = sorted({label for label in label_of if label is not None}.union(classes))
    for label in known:
        if not _names_a_folder(label):
            shown = repr(label if len(label) < 80 else f"{label[:80]}...")
            raise UserError(f"{printable(path)}: {shown} cannot name a class folder; rename that class")
    astray = next((name for name in names if not stays_inside(name)), None)
    if astray is not None:
        raise UserError(f"{printable(path)}: {printable(astray)} would leave the target folder; rename that image")
    places = {name: i for i, name in enumerate(known)}
    labels = np.array([-1 if label is None else places[label] for label in label_of], np.int64)
    stored = [class_first(name, label) for name, label in zip(names, label_of, strict=True)]
    double = next((name for name, count in Counter(stored).items() if count > 1), None)
    if double is not None:
        raise UserError(f"{printable(path)}: two images are named {printable(double)}; remove or rename one")
    return Source(path, kind, stored, labels, known, faults, locate, origins or names)


def _names_a_folder(label: str) -> bool:
    try:
        length = len(os.fsencode(label))
    except UnicodeEncodeError:  # half of a surrogate pair, as JSON can hold
        return False
    return 0 < length <= LONGEST_NAME and not is_hidden(label) and not set(label) & set("/\0\n")


def pad_numbers(labels: Sequence[str | None]) -> list[str | None]:
    """Pad numeric labels with zeros, so that text order is their order by value."""
    if all(label is None or (label.isdecimal() and len(label) <= _MOST_DIGITS) for label in labels):
        width = max((len(label) for label in labels if label is not None), default=0)
        return [None if label is None else label.zfill(width) for label in labels]
    return list(labels)
