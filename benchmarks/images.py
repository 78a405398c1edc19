"""The images that are read: a bounded choice from a folder, in the page cache, and the same in a ``.beton`` file."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from loaders.datasets.beton import is_beton
from loaders.datasets.dataset import ImageDataset, open_folder
from loaders.errors import UserError
from photographs import cache_folder

_CLASSES = 1000


@dataclass(frozen=True, eq=False)
class Images:
    """The chosen images, as they are sent to other processes: names below ``root``, ``sizes``, ``plain`` and
    ``file_sizes`` as in :class:`ImageDataset`."""

    root: Path
    names: list[str]
    sizes: np.ndarray
    plain: np.ndarray
    file_sizes: np.ndarray | None

    def dataset(self) -> ImageDataset:
        """As loaders take them. Labels are made up: they do not matter to time, and so any folder will do."""
        labels = np.arange(len(self.names), dtype=np.int64) % _CLASSES
        classes = [f"{i:04d}" for i in range(_CLASSES)]
        return ImageDataset(
            self.root, self.names, labels, classes, self.sizes, self.plain, file_sizes=self.file_sizes
        )  # fmt: skip


def open_images(folder: Path, most: int) -> Images:
    """At most ``most`` images of ``folder``, evenly spaced, each read once so that it is in the page cache."""
    if is_beton(folder):
        raise UserError(f"{folder}: this benchmark starts from image files; give their folder")
    dataset = open_folder(folder, on_error="skip", quiet=True)
    chosen = np.linspace(0, len(dataset) - 1, min(most, len(dataset))).round().astype(np.int64)
    dataset = dataset.subset(chosen)
    for path in dataset.paths:
        Path(path).read_bytes()
    return Images(dataset.root.absolute(), dataset.names, dataset.sizes, dataset.plain, dataset.file_sizes)


def describe(images: Images) -> dict[str, Any]:
    """Their number, and means of their pixels and kilobytes."""
    kilobytes = [(images.root / name).stat().st_size / 1000 for name in images.names]
    return {
        "name": images.root.name,
        "images": len(images.names),
        "mean_pixels": float(images.sizes.prod(1, dtype=np.int64).mean()),
        "mean_kilobytes": float(np.mean(kilobytes)),
    }


def line(description: dict[str, Any]) -> str:
    """:func:`describe` in one line."""
    per_pixel = 1000 * description["mean_kilobytes"] / description["mean_pixels"]
    return (
        f"data: {description['images']:,} images of {description['name']}, mean {description['mean_pixels']:,.0f} "
        f"pixels, {description['mean_kilobytes']:.1f} kB ({per_pixel:.2f} bytes a pixel)"
    )


def store(images: Images) -> Path:
    """A ``.beton`` file of ``images`` in the cache folder, made by the code of ``cocor-prep convert`` if need be.

    JPEG files keep their bytes; the others are encoded anew.
    """
    from loaders.prep.byte_ranges import FileBytes
    from loaders.prep.convert import convert
    from loaders.prep.encode import Settings
    from loaders.prep.source import Source

    dataset = images.dataset()
    path = cache_folder() / f"{_fingerprint(dataset)}.beton"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        source = Source(
            dataset.root, "folder", dataset.names, dataset.labels, dataset.classes, [],
            lambda index: FileBytes(dataset.paths[index]),
        )  # fmt: skip
        convert(source, path, "beton", Settings(), force=True)  # another process may just have made the same
    return path


def _fingerprint(dataset: ImageDataset) -> str:
    """Of these very files: a data set's digest is that of names and sizes in pixels only."""
    fingerprint = hashlib.sha256(dataset.digest.encode())
    for path in dataset.paths:
        status = Path(path).stat()
        fingerprint.update(f"{status.st_size} {status.st_mtime_ns}\n".encode())
    return fingerprint.hexdigest()[:16]
