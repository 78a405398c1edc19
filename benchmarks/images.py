"""Images to read: a bounded choice from a folder, the same in a ``.beton`` file, or photographs made for the purpose.

A made-up image is a mosaic of crops from scikit-image's colour photographs, shrunk and mirrored at random, so that it
has a photograph's detail. Width, height and bytes follow 500 files of ImageNet's training set, as near as a JPEG
quality comes; as in ImageNet, four in five store colour at full resolution (4:4:4).
"""

import hashlib
import io
import itertools
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
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

# Width, height and kilobytes of 64 files, one of each of 64 equal strata, by bytes, of 500 random files of ImageNet's
# training set (mean 110 kB, 198,000 pixels): the one nearest to its stratum's means.
IMAGENET = (
    *((128, 160, 4), (200, 156, 9), (180, 240, 13), (400, 200, 16), (350, 236, 20), (400, 400, 23), (400, 300, 26)),
    *((400, 300, 30), (400, 315, 31), (500, 374, 33), (437, 371, 35), (500, 375, 38), (333, 500, 39), (500, 375, 44)),
    *((500, 330, 48), (500, 375, 57), (550, 412, 63), (600, 450, 67), (500, 421, 70), (332, 500, 74), (500, 375, 78)),
    *((339, 500, 80), (394, 500, 83), (500, 375, 86), (500, 375, 90), (500, 407, 92), (500, 375, 96), (381, 500, 97)),
    *((500, 334, 100), (500, 375, 101), (500, 333, 105), (500, 375, 108), (357, 500, 110), (433, 500, 112)),
    *((500, 358, 115), (500, 375, 118), (500, 372, 121), (500, 375, 123), (375, 500, 125), (425, 500, 128)),
    *((500, 335, 132), (500, 375, 135), (500, 371, 137), (375, 500, 139), (359, 500, 141), (500, 337, 143)),
    *((500, 375, 146), (500, 375, 148), (500, 335, 151), (500, 375, 155), (500, 375, 158), (396, 500, 164)),
    *((500, 409, 169), (500, 380, 173), (500, 500, 176), (500, 375, 178), (500, 375, 183), (500, 374, 189)),
    *((500, 500, 197), (375, 500, 205), (500, 356, 212), (375, 500, 227), (700, 500, 260), (1152, 864, 482)),
)

_CELL = 200  # pixels a side of a crop in the mosaic, about
_FOLDERS, _CLASSES = 8, 1000  # of made-up images; made-up labels
_QUALITIES = (20, 99)
_VERSION = 1  # of the made-up images, part of the folder's name


@dataclass(frozen=True, eq=False)
class Images:
    """Chosen images, picklable, with the fields of an ImageDataset."""

    root: Path
    names: list[str]
    sizes: np.ndarray
    plain: np.ndarray
    file_sizes: np.ndarray | None

    def dataset(self) -> ImageDataset:
        """Build the data set. Labels are made up: they do not affect time, and so any folder will do."""
        labels = np.arange(len(self.names), dtype=np.int64) % _CLASSES
        classes = [f"{i:04d}" for i in range(_CLASSES)]
        return ImageDataset(
            self.root, self.names, labels, classes, self.sizes, self.plain, file_sizes=self.file_sizes
        )  # fmt: skip


def open_images(folder: Path, most: int) -> Images:
    """Open at most ``most`` images of ``folder``, evenly spaced, each read once so that it is in the page cache."""
    if is_beton(folder):
        raise UserError(f"{folder}: this benchmark starts from image files; give their folder")
    dataset = open_folder(folder, on_error="skip", quiet=True)
    chosen = np.linspace(0, len(dataset) - 1, min(most, len(dataset))).round().astype(np.int64)
    dataset = dataset.subset(chosen)
    for path in dataset.paths:
        Path(path).read_bytes()
    return Images(dataset.root.absolute(), dataset.names, dataset.sizes, dataset.plain, dataset.file_sizes)


def describe(images: Images) -> dict[str, Any]:
    """Count the images and average their pixels and kilobytes."""
    kilobytes = [(images.root / name).stat().st_size / 1000 for name in images.names]
    return {
        "name": images.root.name,
        "images": len(images.names),
        "mean_pixels": float(images.sizes.prod(1, dtype=np.int64).mean()),
        "mean_kilobytes": float(np.mean(kilobytes)),
    }


def line(description: dict[str, Any]) -> str:
    """Format :func:`describe` in one line."""
    per_pixel = 1000 * description["mean_kilobytes"] / description["mean_pixels"]
    return (
        f"data: {description['images']:,} images of {description['name']}, mean {description['mean_pixels']:,.0f} "
        f"pixels, {description['mean_kilobytes']:.1f} kB ({per_pixel:.2f} bytes a pixel)"
    )


def store(images: Images) -> Path:
    """Convert ``images`` to a ``.beton`` file in the cache folder, unless it is there, as ``cocor-prep`` does."""
    dataset = images.dataset()
    fingerprint = hashlib.sha256(dataset.digest.encode())  # a digest is of names and pixel sizes only: not enough here
    for status in (Path(path).stat() for path in dataset.paths):
        fingerprint.update(f"{status.st_size} {status.st_mtime_ns}\n".encode())
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
    """Make ``count`` JPEG files in class folders, the same bytes each time; a complete folder is reused.

    Raises:
        UserError: scikit-image is missing, or the folder holds something else.
    """
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
    rng = np.random.default_rng(number)
    width, height, kilobytes = IMAGENET[number % len(IMAGENET)]
    image = _mosaic(sources, width, height, rng)
    subsampling = "4:4:4" if rng.random() < 0.8 else "4:2:0"
    (work / f"{number % _FOLDERS}" / f"{number:05d}.jpg").write_bytes(_encode(image, kilobytes * 1000, subsampling))


def _mosaic(sources: list[Image.Image], width: int, height: int, rng: np.random.Generator) -> Image.Image:
    canvas = Image.new("RGB", (width, height))
    columns, rows = max(1, round(width / _CELL)), max(1, round(height / _CELL))
    for column, row in itertools.product(range(columns), range(rows)):
        left, right = width * column // columns, width * (column + 1) // columns
        top, bottom = height * row // rows, height * (row + 1) // rows
        canvas.paste(_cut(sources[rng.integers(len(sources))], right - left, bottom - top, rng), (left, top))
    return canvas


def _cut(photograph: Image.Image, width: int, height: int, rng: np.random.Generator) -> Image.Image:
    """A random part of ``photograph``, shrunk up to twofold, or by what fits into it."""
    most = min(2.0, photograph.width / width, photograph.height / height)
    scale = rng.uniform(min(1.0, most), most)
    w, h = int(width * scale), int(height * scale)
    left, top = int(rng.integers(photograph.width - w + 1)), int(rng.integers(photograph.height - h + 1))
    part = photograph.resize((width, height), Image.Resampling.BICUBIC, (left, top, left + w, top + h))
    return part.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if rng.random() < 0.5 else part


def _encode(image: Image.Image, wanted: int, subsampling: str) -> bytes:
    """Encode with the JPEG quality that comes nearest to ``wanted`` bytes, by bisection."""
    low, high = _QUALITIES
    best = b""
    while low <= high:
        quality, buffer = (low + high) // 2, io.BytesIO()
        image.save(buffer, "JPEG", quality=quality, subsampling=subsampling)
        data = buffer.getvalue()
        best = min(best, data, key=lambda candidate: abs(len(candidate) - wanted))
        low, high = (quality + 1, high) if len(data) < wanted else (low, quality - 1)
    return best
