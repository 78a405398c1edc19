"""Layout of a data set: its splits, and folders that are given one level off.

Training would not show that: splits would be taken for classes, or a single class for a flat folder of images.
"""

import logging
import os
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path

from loaders.datasets.folder import Listing, is_hidden
from loaders.errors import UserError
from loaders.text import bare, counted, is_text, printable

# What the splits of a data set are called: folders, or .beton files that cocor-prep has made.
TRAIN = ("train", "training", "trn")
VAL = ("val", "valid", "validation")
TEST = ("test", "testing", "tst")
SPLITS = frozenset({*TRAIN, *VAL, *TEST})
_SHARDS = (".tar", ".parquet")
_log = logging.getLogger(__name__)
_LOOKED_AT = 20  # folders and names, where a guess is enough


def find_split(folder: Path, names: Sequence[str]) -> Path | None:
    """Find the first folder of ``names`` in ``folder``, else the first ``.beton``."""
    files = (folder / f"{name}.beton" for name in names)
    return next((path for path in (*map(folder.joinpath, names), *files) if path.exists()), None)


def training_splits(folder: Path) -> tuple[Path, Path] | None:
    """Find ``folder``'s splits for training and validation (else test), or None."""
    train, held_out = find_split(folder, TRAIN), find_split(folder, VAL) or find_split(folder, TEST)
    return None if train is None or held_out is None else (train, held_out)


def refuse_what_is_no_class(root: Path, listing: Listing) -> None:
    """Raise :class:`UserError` if the folders in ``root`` are no classes.

    They may be splits, folders of splits, or a single one that holds all classes; the error names the folder to give.
    """
    inside: dict[str, set[str]] = {folder: set() for folder in listing.folders}  # folders with images; "" for itself
    for name in listing.names:
        top, slash, rest = name.partition("/")
        if slash:
            inside.setdefault(top, set()).add(rest.partition("/")[0] if "/" in rest else "")
    if inside and _are_splits(inside):
        raise UserError(
            f"{printable(root)}: holds the splits {_joined(inside)}, not classes; "
            f"give one of them, such as {printable(root / _for_training(inside))}"
        )
    for folder, within in inside.items():
        place = printable(root / folder)
        if within and _are_splits(within):
            raise UserError(
                f"{place}: holds the splits {_joined(within)} and is no class; "
                f"give one of them, such as {printable(root / folder / _for_training(within))}"
            )
        if len(inside) == 1 and len(within) > 1 and "" not in within:
            raise UserError(
                f"{printable(root)}: its only class would be {printable(folder)}, which holds {len(within):,} folders "
                f"of images and no image of its own; give {place}"
            )


def without_texts(path: Path, names: Sequence[str], quiet: bool = False) -> list[int]:
    """Return the places of ``names`` that are no text files'; a line in the log tells of those."""
    texts = [name for name in names if is_text(name)]
    if texts and not quiet:
        count = f"{counted(len(texts), 'text file')}, such as {printable(texts[0])}"
        _log.info(f"{printable(path)}: passed over {count}")  # not on every rank
    return [place for place, name in enumerate(names) if not is_text(name)]


def tiny_imagenet_labels(root: Path) -> Path | None:
    """Find the label file of Tiny ImageNet's own ``val`` folder, if ``root`` is one."""
    path = root / "val_annotations.txt"
    return path if path.is_file() and (root / "images").is_dir() else None


def refuse_shards(path: Path, names: Sequence[str]) -> None:
    """Raise :class:`UserError` if all ``names`` are of tars or parquet shards."""
    if names and all(name.endswith(_SHARDS) for name in names):
        raise UserError(
            f"{printable(path)}: tars and parquet shards are no images; "
            f"convert it first: cocor-prep convert {printable(path)} NAME.beton"
        )


def folder_above(root: Path) -> Path | None:
    """Find the folder of classes of which the flat folder ``root`` seems to be one."""
    if not root.is_dir():
        return None
    here = root.absolute()
    try:
        with os.scandir(here.parent) as entries:
            beside = [entry.path for entry in entries if not is_hidden(entry.name) and entry.is_dir()]
        others = [place for place in beside if place != str(here)][:_LOOKED_AT]
        return here.parent if any(map(_holds_only_images, others)) else None
    except OSError:
        return None


def _holds_only_images(folder: str) -> bool:
    """Tell whether the first few visible names in ``folder`` are those of images."""
    with os.scandir(folder) as entries:
        first = list(islice((entry for entry in entries if not is_hidden(entry.name)), _LOOKED_AT))
    return bool(first) and all(bare(entry.name) != entry.name and entry.is_file() for entry in first)


def _are_splits(folders: Iterable[str]) -> bool:
    return all(folder.lower() in SPLITS for folder in folders)


def _for_training(splits: Iterable[str]) -> str:
    return min(splits, key=lambda name: (not name.lower().startswith("train"), name))


def _joined(names: Iterable[str]) -> str:
    return ", ".join(map(printable, sorted(names)))
