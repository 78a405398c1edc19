"""Demo data: tiles of ten classes, cut from scikit-image's photographs.

Validation tiles come from cells of a photograph that no training tile touches. Tiles vary in scale.

Colour and brightness say nothing about the class: a tile keeps the photograph's structure (the order of its pixels by
luminance), but its tones follow one fixed curve, and its colours are those of a tile drawn at random. A colour
histogram classifies at chance, an untrained network somewhat above it, and a trained one far above.
"""

import importlib.util
from contextlib import suppress
from pathlib import Path
from statistics import NormalDist

import numpy as np
from PIL import Image

from loaders.errors import UserError
from loaders.files import check_folder, user_cache
from loaders.prep.output import staged

DEMO = "demo"  # what --data calls the set, unless there is a folder of that name
TILE = 48  # pixels
TRAIN, VAL = 300, 60  # tiles a class
SIDES = (40, 52)  # of the square cut from the photograph, in its pixels
FLATTEST = 10.0  # least standard deviation of the luminance, in grey levels: skips empty sky and paper
MEAN, DEVIATION = 122.0, 50.0  # of every tile's luminance, in grey levels
CHROMA = 0.8  # share of the palette's colourfulness
COLUMNS = 4
VALIDATION_COLUMN = (1, 3, 0, 2)  # of each row of cells, so that the cells lie scattered
ORIGIN = "ORIGIN.txt"
NOTE = (
    "cocor demo tiles, version 1, cut from the photographs in scikit-image's data folder"
    " (licences: README.txt there and the documentation of skimage.data).\n"
)
LUMA = np.array([0.299, 0.587, 0.114])


CLASSES = {  # a file of ``skimage/data``, and the rows of its grid of cells
    "bricks": ("brick.png", 4), "coins": ("coins.png", 3), "fur": ("chelsea.png", 3),
    "galaxies": ("hubble_deep_field.jpg", 4), "grass": ("grass.png", 4), "gravel": ("gravel.png", 4),
    "handwriting": ("text.png", 2), "print": ("page.png", 2), "retina": ("retina.jpg", 4), "tissue": ("ihc.png", 4),
}  # fmt: skip
PALETTES = ("astronaut.png", "chelsea.png", "coffee.png", "ihc.png", "motorcycle_left.png", "retina.jpg", "rocket.jpg")


def or_demo(path: Path) -> Path:
    """Return ``path``, or the demo's folder if it :func:`is_demo`."""
    return make_demo() if is_demo(path) else path


def is_demo(path: Path) -> bool:
    """Tell whether ``path`` is "demo", and no folder of images has that name."""
    return str(path) == DEMO and (not path.exists() or (path / "config.yaml").exists())  # a run may be called so, too


def make_demo(folder: Path | None = None) -> Path:
    """Make the set, once, and return its folder with ``train/`` and ``val/``.

    ``folder`` is ``cocor/demo`` in the user's cache by default. UserError if scikit-image or one of its photographs is
    missing, or if the folder holds something else.
    """
    target = user_cache() / "demo" if folder is None else folder
    if _complete(target):
        return target
    photographs = {
        name: _open(photograph_folder() / name) for name in {*PALETTES, *(file for file, _ in CLASSES.values())}
    }
    empty = target.is_dir() and not any(target.iterdir())
    check_folder("XDG_CACHE_HOME", target.parent)
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        with staged(target, folder=True, force=empty) as work:
            _write(work, photographs)
    except UserError:
        if not _complete(target):  # else another process was faster
            raise
    return target


def _complete(target: Path) -> bool:
    with suppress(OSError):
        return (target / ORIGIN).read_text() == NOTE
    return False


def _write(work: Path, photographs: dict[str, Image.Image]) -> None:
    rng = np.random.default_rng(0)
    palettes = [
        _palette(np.asarray(tile))
        for name in PALETTES
        for tile in _cut(photographs[name], rows=4, val=False, count=TRAIN // 5, rng=rng)
    ]
    for name, (file, rows) in CLASSES.items():
        for split, count in (("train", TRAIN), ("val", VAL)):
            (work / split / name).mkdir(parents=True)
            for number, tile in enumerate(_cut(photographs[file], rows, split == "val", count, rng)):
                painted = _repaint(tile, palettes[rng.integers(len(palettes))], rng)
                painted.save(work / split / name / f"{name}_{number:03d}.jpg", quality=95, subsampling=0)
    (work / ORIGIN).write_text(NOTE)


def photograph_folder() -> Path:
    """Find the folder of scikit-image's photographs without importing the package."""
    spec = importlib.util.find_spec("skimage")
    if spec is None or not spec.submodule_search_locations:
        raise UserError("the demo data needs scikit-image: pip install scikit-image")
    return Path(spec.submodule_search_locations[0]) / "data"


def _open(path: Path) -> Image.Image:
    try:
        return Image.open(path).convert("RGB")
    except OSError as error:
        raise UserError(f"{path}: not readable; pip install --force-reinstall scikit-image") from error


def _cut(photograph: Image.Image, rows: int, val: bool, count: int, rng: np.random.Generator) -> list[Image.Image]:
    """Cut random squares that lie wholly inside (``val``) or outside validation cells."""
    width, height = photograph.size
    held_out = np.zeros((height + 1, width + 1), np.int64)
    for row in range(rows):
        top, bottom = height * row // rows, height * (row + 1) // rows
        left, right = (width * (VALIDATION_COLUMN[row] + step) // COLUMNS for step in (0, 1))
        held_out[top + 1 : bottom + 1, left + 1 : right + 1] = 1
    area = held_out.cumsum(0).cumsum(1)  # of validation cells above and left of a corner
    grey = np.asarray(photograph.convert("L"))
    tiles: list[Image.Image] = []
    while len(tiles) < count:
        side = int(rng.integers(SIDES[0], SIDES[1] + 1))
        top, left = int(rng.integers(height - side + 1)), int(rng.integers(width - side + 1))
        bottom, right = top + side, left + side
        inside = area[bottom, right] - area[top, right] - area[bottom, left] + area[top, left]
        if inside == (side * side if val else 0) and grey[top:bottom, left:right].std() >= FLATTEST:
            tiles.append(photograph.resize((TILE, TILE), Image.Resampling.BILINEAR, (left, top, right, bottom)))
    return tiles


def _palette(tile: np.ndarray) -> np.ndarray:
    """Compute the colour of each luminance rank, dark to bright: float64 (TILE**2, 3)."""
    pixels = tile.reshape(-1, 3).astype(np.float64)
    pixels = pixels[np.argsort(pixels @ LUMA, kind="stable")]
    window = len(pixels) // 32 | 1
    padded = np.pad(pixels, ((window // 2 + 1, window // 2), (0, 0)), mode="edge").cumsum(0)
    smooth = (padded[window:] - padded[:-window]) / window
    normal = NormalDist(MEAN, DEVIATION)
    tones = np.clip([normal.inv_cdf((rank + 0.5) / len(pixels)) for rank in range(len(pixels))], 0, 255)
    return np.clip(tones[:, None] + CHROMA * (smooth - (smooth @ LUMA)[:, None]), 0, 255)


def _repaint(tile: Image.Image, palette: np.ndarray, rng: np.random.Generator) -> Image.Image:
    """Give the pixels, ordered by luminance (ties at random), the palette's colours."""
    luminance = np.asarray(tile).reshape(-1, 3) @ LUMA + rng.random(TILE * TILE)
    painted = np.empty((TILE * TILE, 3), np.uint8)
    painted[np.argsort(luminance, kind="stable")] = np.rint(palette)
    return Image.fromarray(painted.reshape(TILE, TILE, 3))
