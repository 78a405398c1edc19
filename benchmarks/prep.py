"""Compare ``cocor-prep convert`` with Pillow (rates), or loaders (agreement).

    python benchmarks/prep.py rates --data FOLDER
    python benchmarks/prep.py agreement --data FOLDER

rates: files are in the page cache. The loop, in one process, decodes each image and writes it to a file of its own; it
neither checks, flushes nor indexes. All contestants run in turn, and the best of each counts. The last column is images
a second of CPU time, of all processes together, relative to the loop.

agreement: an epoch of the paper's recipe by ``torch`` on the folder (the reference) and by each loader on the .beton
file made of it, on 1, 2 and 4 ranks. Order, labels and compositions must be equal. Originals may differ by decoder and
resize, views by what programs make of that; both in grey levels of 0 to 255. Exits with 1 beyond the bounds below.
"""

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])

from benchmarks.common import script
from loaders.arguments import Parser, positive
from loaders.batch import Batch
from loaders.channels import IMAGENET_STD
from loaders.cpus import available_cores
from loaders.datasets.dataset import ImageDataset, open_folder
from loaders.datasets.stored import open_stored
from loaders.files import check_folder
from loaders.open import LoaderName, open_loader
from loaders.prep.convert import Target, convert
from loaders.prep.encode import Settings, target_size
from loaders.prep.source import Source
from loaders.prep.sources import open_source
from loaders.views.order import BatchOrder
from loaders.views.plan import ViewPlan

_BOUNDS: dict[LoaderName, float] = {"torch": 0.0, "dali": 0.5, "ffcv": 0.5}  # mean over the pixels of any one original
_EPOCH, _SEED = 2, 1


def main() -> None:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, parser_class=Parser)
    rates = commands.add_parser("rates", help="images a second beside a Pillow loop")
    rates.add_argument("--shorter-side", type=positive, default=256)
    rates.add_argument("--repeats", type=positive, default=3)
    rates.add_argument("--work", type=Path, help="where to write (default: beside the data)")
    rates.set_defaults(run=measure_rates)
    agreement = commands.add_parser("agreement", help="do all loaders show the same?")
    agreement.add_argument("--batch-size", type=positive, default=64)
    agreement.add_argument("--image-size", type=positive, default=224)
    agreement.set_defaults(run=measure_agreement)
    for command in (rates, agreement):
        command.add_argument("--data", type=Path, required=True, help="class folders of images")
    options = parser.parse_all()
    options.run(options)


def measure_rates(options: argparse.Namespace) -> None:
    """Print the best rate of each contestant, and its ratio to the Pillow loop."""
    work = options.work or options.data.parent
    check_folder("--work", work)
    source = open_source(options.data)
    for name in source.names:
        (source.path / name).read_bytes()  # into the page cache
    print(f"{len(source):,} images, {available_cores()} cores, best of {options.repeats}")
    with tempfile.TemporaryDirectory(dir=work) as place:
        for side in (None, options.shorter_side):
            race(source, Path(place, "output"), side, options.repeats)


def race(source: Source, root: Path, side: int | None, repeats: int) -> None:
    """Time the Pillow loop and conversions to both targets, with one worker and all."""
    runs: dict[str, Callable[[], object]] = {"Pillow loop": partial(pillow_loop, source, root, side)}
    targets: list[tuple[Target, Path]] = [("beton", root / "x.beton"), ("folder", root / "x")]
    for workers in sorted({1, available_cores()}):
        for target, output in targets:
            name = f"{target}, {workers} worker" + "s" * (workers > 1)
            runs[name] = partial(convert, source, output, target, Settings(side), workers=workers)
    best = {name: (float("inf"), float("inf")) for name in runs}  # wall-clock and CPU seconds
    for _ in range(repeats):
        for name, run in runs.items():
            shutil.rmtree(root, ignore_errors=True)
            root.mkdir()
            start, spent = time.perf_counter(), sum(os.times()[:4])  # with children that have ended
            run()
            took = time.perf_counter() - start, sum(os.times()[:4]) - spent
            best[name] = min(best[name][0], took[0]), min(best[name][1], took[1])
    loop, what = best["Pillow loop"], f"shorter side {side}" if side else "sizes kept"
    for name, (wall, cpu) in best.items():
        ratios = f"{loop[0] / wall:>6.2f} x loop{loop[1] / cpu:>8.2f} x loop a CPU second"
        print(f"{what:<20}{name:<20}{len(source) / wall:>9,.0f} images/s{ratios}")


def pillow_loop(source: Source, root: Path, side: int | None) -> None:
    """Decode every image; write it as it is, or resized."""
    output = root / "loop"
    output.mkdir()
    for index in range(len(source)):
        path = source.path / source.names[index]
        with Image.open(path) as image:
            pixels = image.convert("RGB")
        if side:
            pixels.resize(target_size(*pixels.size, side)).save(output / f"{index}.jpg", quality=95)
        else:
            shutil.copyfile(path, output / f"{index}.jpg")


def measure_agreement(options: argparse.Namespace) -> None:
    """Print the differences of every loader on every number of ranks."""
    plan = ViewPlan(options.image_size, _SEED)
    with tempfile.TemporaryDirectory() as place:
        path = Path(place, "x.beton")
        convert(open_source(options.data), path, "beton", Settings())
        folder, stored = open_folder(options.data), open_stored(path)
        for world in (1, 2, 4):
            found: dict[LoaderName, list[Tensor]] = {name: [] for name in _BOUNDS}
            seen: list[int] = []
            for rank in range(world):
                size = options.batch_size
                order = BatchOrder(len(folder), size, seed=_SEED, rank=rank, world_size=world, drop_last=False)
                for name in found:
                    reference = epoch("torch", folder, plan, order)
                    for batch, expected in zip(epoch(name, stored, plan, order), reference, strict=True):
                        seen += batch.index.tolist() if name == "torch" else []
                        for field in ("index", "label", "composition"):
                            if not torch.equal(getattr(batch, field), getattr(expected, field)):
                                raise SystemExit(f"{name}: another {field}")
                        levels_of_views = levels(batch.views, expected.views).mean(0)
                        found[name].append(torch.stack([levels(batch.original, expected.original), levels_of_views], 1))
            if sorted(seen) != list(range(len(folder))):
                raise SystemExit(f"{world} ranks: an epoch does not show every image once")
            for name, differences in found.items():
                both = torch.cat(differences)
                (original, views), (worst, worst_views) = both.mean(0).tolist(), both.amax(0).tolist()
                print(
                    f"{world} rank{'s' * (world > 1):<1}  {name:<6}{len(both):,} samples: originals {original:.3f} "
                    f"(worst {worst:.3f}), views {views:.3f} (worst {worst_views:.3f}) grey levels"
                )
                if worst > _BOUNDS[name]:
                    raise SystemExit(f"{name}: an original differs by more than {_BOUNDS[name]} grey levels")


def epoch(name: LoaderName, dataset: ImageDataset, plan: ViewPlan, order: BatchOrder) -> Iterator[Batch]:
    """Load one epoch on the CPU, without empty batches of ranks that have no share."""
    with closing(open_loader(name, dataset, plan, order, workers=0 if name == "torch" else 2)) as loader:
        yield from (batch for batch in loader.epoch(_EPOCH) if len(batch.index))


def levels(first: Tensor, second: Tensor) -> Tensor:
    """Average absolute differences of images (..., 3, H, W) in grey levels."""
    std = torch.tensor(IMAGENET_STD).view(3, 1, 1)
    return ((first - second).abs() * std * 255).mean((-3, -2, -1))


if __name__ == "__main__":
    script("prep.py", main)
