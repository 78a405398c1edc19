"""Validation labels of ImageNet in the two official forms that are no plain (name, label) lists.

- The development kit's ``ILSVRC2012_validation_ground_truth.txt``: one number a line, in the order of the file names.
  The numbers are the kit's own, not places among the sorted class names: its ``meta.mat``, beside the file, says which
  class each one means. Reading them as places is a classic mistake that leaves an accuracy of 0.1 %.
- The competition site's ``LOC_val_solution.csv``: names without suffix, the class first in a field of boxes.
"""

from collections.abc import Sequence
from pathlib import Path

from loaders.errors import UserError
from loaders.text import printable

_MOST_DIGITS = 9
_KAGGLE_HEADER = "ImageId,PredictionString"


def ilsvrc_labels(path: Path, lines: Sequence[tuple[int, str]], names: Sequence[str]) -> dict[int, str] | None:
    """Class identifiers by image place; None if ``lines`` (number, text) have neither form."""
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
