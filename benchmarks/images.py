"""Images to read: from a folder, the same as a ``.beton`` file, or made up.

A made-up image is a part of one of scikit-image's colour photographs, with the size, bytes and colour resolution of
most of ImageNet's files.
"""

import hashlib
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from loaders.cpus import available_cores
from loaders.datasets.beton import is_beton
from loaders.datasets.dataset import ImageDataset, open_folder
from loaders.errors import UserError
from loaders.files import user_cache
from loaders.prep.byte_ranges import FileBytes
from loaders.prep.convert import convert
from loaders.prep.demo import photograph_folder
from loaders.prep.encode import Settings
from loaders.prep.output import staged
from loaders.prep.source import Source

PHOTOGRAPHS = (
    *("astronaut.png", "chelsea.png", "coffee.png", "hubble_deep_field.jpg"),
    *("ihc.png", "motorcycle_left.png", "retina.jpg", "rocket.jpg"),
)

_SIZE, _QUALITY = (500, 375), 97  # most of ImageNet's files have this size; about 110 kB
_FOLDERS, _CLASSES, _VERSION = 8, 1000, 2  # of made-up images; made-up labels; part of the folder's name


def open_images(folder: Path, most: int) -> ImageDataset:
    """Open at most ``most`` images of ``folder``, evenly spaced, and read each once.

    Their labels are made up, so that any folder will do.
    """
    if is_beton(folder):
        raise UserError(f"{folder}: this benchmark starts from image files; give their folder")
    dataset = open_folder(folder, on_error="skip", quiet=True)
    chosen = np.linspace(0, len(dataset) - 1, min(most, len(dataset))).round().astype(np.int64)
    dataset = dataset.subset(chosen)
    for path in dataset.paths:
        Path(path).read_bytes()
    labels, classes = np.arange(len(dataset), dtype=np.int64) % _CLASSES, [f"{i:04d}" for i in range(_CLASSES)]
    return replace(dataset, root=dataset.root.absolute(), labels=labels, classes=classes)


def describe(images: ImageDataset) -> dict[str, Any]:
    """Count the images and average their pixels and kilobytes."""
    assert images.file_sizes is not None
    return {
        "name": images.root.name,
        "images": len(images.names),
        "mean_pixels": float(images.sizes.prod(1, dtype=np.int64).mean()),
        "mean_kilobytes": float(images.file_sizes.mean()) / 1000,
    }


def line(description: dict[str, Any]) -> str:
    """Format :func:`describe` in one line."""
    per_pixel = 1000 * description["mean_kilobytes"] / description["mean_pixels"]
    return (
        f"data: {description['images']:,} images of {description['name']}, mean {description['mean_pixels']:,.0f} "
        f"pixels, {description['mean_kilobytes']:.1f} kB ({per_pixel:.2f} bytes a pixel)"
    )


def store(dataset: ImageDataset) -> Path:
    """Convert images to a ``.beton`` file in the cache folder, unless it is there."""
    fingerprint = hashlib.sha256(dataset.digest.encode())  # a digest is of names and pixel sizes only: not enough here
    fingerprint.update(np.array([dataset.file_sizes, dataset.file_times]).tobytes())
    path = cache_folder() / f"{fingerprint.hexdigest()[:16]}.beton"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        source = Source(
            dataset.root, "folder", dataset.names, dataset.labels, dataset.classes, [],
            lambda index: FileBytes(dataset.paths[index]),
        )  # fmt: skip
        convert(source, path, "beton", Settings(), force=True)  # another process may just have made the same
    return path


def make_photographs(count: int, folder: Path | None = None) -> Path:
    """Make ``count`` JPEG files, the same each time, unless they are there."""
    target = folder or cache_folder() / f"photographs-{_VERSION}-{count}"
    if target.is_dir() and len(list(target.glob("*/*.jpg"))) == count:
        return target
    print(f"making {count} JPEG files in {target}", file=sys.stderr)
    sources = [Image.open(photograph_folder() / name).convert("RGB") for name in PHOTOGRAPHS]
    target.parent.mkdir(parents=True, exist_ok=True)
    with staged(target, folder=True) as work, ThreadPoolExecutor(available_cores()) as pool:
        for number in range(_FOLDERS):
            (work / f"{number}").mkdir()
        list(pool.map(lambda i: _write(work, sources, i), range(count)))
    return target


def cache_folder() -> Path:
    """Return the folder where benchmarks keep what they have made."""
    return user_cache() / "benchmark"


def _write(work: Path, sources: list[Image.Image], number: int) -> None:
    """Save a random part of a photograph, shrunk up to twofold or enlarged."""
    rng = np.random.default_rng(number)
    photograph, (width, height) = sources[rng.integers(len(sources))], _SIZE
    most = min(2.0, photograph.width / width, photograph.height / height)
    scale = rng.uniform(min(1.0, most), most)
    w, h = int(width * scale), int(height * scale)
    left, top = int(rng.integers(photograph.width - w + 1)), int(rng.integers(photograph.height - h + 1))
    part = photograph.resize(_SIZE, Image.Resampling.BICUBIC, (left, top, left + w, top + h))
    part = part.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if rng.random() < 0.5 else part
    subsampling = "4:4:4" if rng.random() < 0.8 else "4:2:0"  # as ImageNet's files
    part.save(work / f"{number % _FOLDERS}" / f"{number:05d}.jpg", quality=_QUALITY, subsampling=subsampling)
