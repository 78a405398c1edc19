"""Open a data set by name or folder, divided as its protocol says.

    root/cifar-10-batches-py, root/food-101, ...     as torchvision or the authors' archives lay them
    root/NAME/train, root/NAME/test                  or class folders, under the name of the set
    any folder with train and val or test folders    by its path

train.beton, val.beton and test.beton, which cocor-prep makes, may stand for the class folders. Random splits depend on
nothing but the protocol's seed and the order in the data set's own lists.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from cocor.eval.datasets.archives import ARCHIVES, Listed
from cocor.eval.datasets.protocols import CALTECH_SPLIT, DEFAULT_VAL_SHARE, PROTOCOLS, VAL_SHARE, Protocol, of_folder
from loaders.cpus import available_cores
from loaders.datasets.dataset import ImageDataset, OnError, open_folder
from loaders.datasets.folder import Listing
from loaders.datasets.labels import stratified_split
from loaders.datasets.layout import TEST, TRAIN, VAL, find_split
from loaders.datasets.size_index import size_index
from loaders.errors import UserError
from loaders.open import open_images
from loaders.prep.source import read_classes

_IMAGENET = ("", "imagenet", "imagenet1k", "ILSVRC2012", "ILSVRC/Data/CLS-LOC")
_VAL_LABELS = ("LOC_val_solution.csv", "ILSVRC2012_validation_ground_truth.txt")


class Absent(UserError):
    """Error of a data set that is not below the root, which ``transfer`` passes over."""


@dataclass(frozen=True)
class Splits:
    """Data sets of a probe; ``notes`` say where they depart from the protocol."""

    protocol: Protocol
    train: ImageDataset
    val: ImageDataset
    test: ImageDataset
    notes: tuple[str, ...] = ()

    def learned_from(self) -> ImageDataset:
        """Join training and validation images if these were taken from the former."""
        train, val = self.train, self.val
        same = train.root == val.root and type(train) is type(val)
        return train.joined(val) if same else train


def open_named(name: str, root: Path, cache: Path, workers: int | None = None) -> Splits:
    """Open a data set of the protocol table; ``cache`` takes what must be unpacked.

    Raises:
        Absent: it is not there; says where it was looked for.
        UserError: no such name, or it is there but incomplete.
    """
    protocol = PROTOCOLS[name]
    if not root.is_dir():
        raise UserError(f"--root {root}: no such folder")
    if name.startswith("imagenet"):
        return _checked(_open_imagenet(protocol, root, workers))
    archive = ARCHIVES[name]
    base = archive.find(root, name)
    if base is not None:
        try:
            listed = archive.read(base, cache) if name.startswith("cifar") else archive.read(base)
            return _checked(_split(protocol, listed, workers))
        except UserError:
            raise
        except Exception as error:  # pickle, scipy and JSON raise many kinds on damaged lists
            reason = f"damaged lists ({type(error).__name__}: {error})"
            raise UserError(f"{base}: {reason}; unpack the archive of {protocol.title} again") from error
    if find_split(root / name, TRAIN) is not None:
        return _checked(replace(open_splits(root / name, workers), protocol=protocol))
    where = ", ".join(f"{root / folder}" for folder in (*archive.folders, f"{name}/train"))
    raise Absent(f"{protocol.title}: not found; looked for {where}")


def open_splits(folder: Path, workers: int | None = None, on_error: OnError = "stop") -> Splits:
    """Open the train, val and test folders, or .beton files, in ``folder``.

    One of val and test is enough: then 10 % of every class of the training images validate.

    Raises:
        UserError: a folder is missing or unusable.
    """
    if folder.is_file():
        raise UserError(f"{folder}: one file is one split; name the folder that holds train.beton and val.beton")
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; check the path")
    train_root, val_root, test_root = (find_split(folder, names) for names in (TRAIN, VAL, TEST))
    if train_root is None or (val_root is None and test_root is None):
        missing = "train" if train_root is None else "val or test"
        needed = "train/CLASS/... and test/CLASS/..., or train.beton and test.beton"
        raise UserError(f"{folder}: has no {missing} folder; a probe needs {needed}")
    train = open_images(train_root, on_error=on_error, workers=workers)
    if not train.classes:
        raise UserError(f"{train_root}: no class folders; a probe needs labels")

    others = [open_images(root, on_error=on_error, workers=workers, classes=train.classes)
              for root in (val_root, test_root) if root is not None]  # fmt: skip
    left_out = sum(len(part.skipped) for part in (train, *others))
    notes = (f"{left_out:,} unusable files are left out",) if left_out else ()
    fitted, val = (train, others[0]) if len(others) == 2 else _hold_out(train, DEFAULT_VAL_SHARE, 0)
    return Splits(of_folder(folder.resolve().name), fitted, val, others[-1], notes)


def _hold_out(train: ImageDataset, share: float, seed: int) -> tuple[ImageDataset, ImageDataset]:
    """Divide into training and validation images; a class keeps at least one for training."""
    chosen = stratified_split(train.labels, share, seed)
    counts = np.bincount(train.labels[train.labels >= 0])
    chosen = chosen[counts[train.labels[chosen]] > 1]
    if not len(chosen):
        raise UserError(f"{train.root}: one image a class: none to validate on; add images, or a val folder beside it")
    return train.subset(np.setdiff1d(np.arange(len(train)), chosen)), train.subset(chosen)


def _open_imagenet(protocol: Protocol, root: Path, workers: int | None) -> Splits:
    """Open ImageNet's train and val folders; ImageNet-100 has a folder of its own, or its classes are chosen."""
    own = root / protocol.name
    places = [own, *(root / folder for folder in _IMAGENET)]
    base = next((p for p in places if (p / "train").is_dir() and (p / "val").is_dir()), None)
    if base is None or not any(path.is_dir() for path in (base / "train").glob("n*")):
        raise Absent(f"{protocol.title}: not found; looked for train and val below {', '.join(map(str, places))}")
    val = base / "val"
    around = (base, val, root, root / "ILSVRC2012_devkit_t12" / "data")
    labels = next((p / n for p in around for n in _VAL_LABELS if (p / n).is_file()), None)
    flat = not any(path.is_dir() for path in val.glob("n*"))
    train = open_folder(base / "train", workers=workers)
    test = open_folder(val, labels if flat else None, workers=workers, classes=train.classes)
    if protocol.name == "imagenet100":
        train, test = _of_classes(train, read_classes("imagenet100")), _of_classes(test, read_classes("imagenet100"))
    share = VAL_SHARE.get(protocol.name, DEFAULT_VAL_SHARE)
    return Splits(protocol, *_hold_out(train, share, protocol.seed or 0), test)


def _of_classes(dataset: ImageDataset, wanted: list[str]) -> ImageDataset:
    missing = sorted(set(wanted) - set(dataset.classes))
    if missing:
        raise UserError(f"{dataset.root}: has no class {missing[0]} (nor {len(missing) - 1} more of the 100)")
    place = {dataset.classes.index(name): number for number, name in enumerate(wanted)}
    chosen = dataset.subset([i for i, label in enumerate(dataset.labels.tolist()) if label in place])
    return replace(chosen, classes=wanted, labels=np.array([place[i] for i in chosen.labels.tolist()], np.int64))


def _split(protocol: Protocol, listed: Listed, workers: int | None) -> Splits:
    """Open the listed files once, keeping the index of their sizes, and divide them. UserError for unusable ones."""
    root, classes, splits = listed
    rows = [row for split in splits.values() for row in split]
    listing = Listing([name for name, _ in rows])
    for name in listing.names:
        try:
            status = (root / name).stat()
        except OSError as error:
            raise UserError(f"{root / name}: {error.strerror}, but listed; unpack the archive again") from None
        listing.sizes.append(status.st_size)
        listing.mtimes.append(status.st_mtime_ns)
    index = size_index(root, listing, workers or available_cores())
    if index.faults:
        place = min(index.faults)
        raise UserError(f"{root / listing.names[place]}: {index.faults[place]}; unpack the archive again")
    places = {name: place for place, name in enumerate(classes)}
    labels = np.array([places[label] for _, label in rows], np.int64)
    states = np.array(listing.sizes, np.int64), np.array(listing.mtimes, np.int64)
    whole = ImageDataset(root, listing.names, labels, classes, index.sizes, index.plain, (), *states)
    ends = np.cumsum([len(split) for split in splits.values()])
    parts = dict(zip(splits, np.split(np.arange(len(rows)), ends[:-1]), strict=True))
    if "all" in parts:
        chosen = _caltech_split(labels, protocol.seed or 0)
    elif "val" in parts:
        chosen = parts["train"], parts["val"], parts["test"]
    else:
        chosen = *random_split(parts["train"], protocol), parts["test"]
    train, val, test = (whole.subset(part) for part in chosen)
    return Splits(protocol, train, val, test)


def random_split(index: npt.NDArray[np.int64], protocol: Protocol) -> tuple[npt.NDArray[np.int64], ...]:
    """Split as ``torch.utils.data.random_split`` does; by share if images are missing."""
    val = round(len(index) * protocol.val / (protocol.train + protocol.val))
    order = torch.randperm(len(index), generator=torch.Generator().manual_seed(protocol.seed or 0)).numpy()
    return index[order[: len(index) - val]], index[order[len(index) - val :]]


def _caltech_split(labels: npt.NDArray[np.int64], seed: int) -> tuple[npt.NDArray[np.int64], ...]:
    """Choose 25 images of every class for training, 5 for validation, the rest for testing."""
    generator = torch.Generator().manual_seed(seed)
    parts: tuple[list[int], ...] = ([], [], [])
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        if len(members) <= sum(CALTECH_SPLIT):
            raise UserError(f"Caltech-101: a class has only {len(members)} images; unpack its archive again")
        shuffled = members[torch.randperm(len(members), generator=generator).numpy()]
        for part, chosen in zip(parts, np.split(shuffled, np.cumsum(CALTECH_SPLIT)), strict=True):
            part.extend(np.sort(chosen).tolist())
    return tuple(np.array(part, np.int64) for part in parts)


def _checked(splits: Splits) -> Splits:
    """Add notes on every count that is not the protocol's."""
    protocol, parts = splits.protocol, {"training": splits.train, "validation": splits.val, "test": splits.test}
    notes = list(splits.notes)
    for (name, part), wanted in zip(parts.items(), (protocol.train, protocol.val, protocol.test), strict=True):
        if wanted and len(part) != wanted:
            notes.append(f"{len(part):,} {name} images instead of {wanted:,}")
    if protocol.classes and len(splits.train.classes) != protocol.classes:
        notes.append(f"{len(splits.train.classes)} classes instead of {protocol.classes}")
    return replace(splits, notes=tuple(notes))
