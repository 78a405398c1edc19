"""Images per second of ``cocor-prep convert``, beside a plain Pillow loop that does the same work in one process.

    python benchmarks/prep_rates.py --data FOLDER

Times the best of several runs, files in the page cache. The loop neither checks, nor flushes to the disk, nor writes
an index: it reads, decodes where it must, and writes one file an image.
"""

import argparse
import shutil
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from PIL import Image

from loaders.names import available_cores
from loaders.prep.convert import Target, convert
from loaders.prep.encode import Settings, target_size
from loaders.prep.sources import Source, open_source


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--data", type=Path, required=True, help="class folders of images")
    parser.add_argument("--shorter-side", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    source = open_source(options.data)
    cores = available_cores()
    print(f"{len(source):,} images, {cores} cores")
    with tempfile.TemporaryDirectory(dir=options.data.parent) as place:
        root = Path(place)
        for side in (None, options.shorter_side):
            what = f"shorter side {side}" if side else "sizes kept"
            report(what, "Pillow loop", source, options.repeats, partial(pillow_loop, source, root, side))
            for workers in sorted({1, cores}):
                targets: list[tuple[Target, Path]] = [("beton", root / "x.beton"), ("folder", root / "x")]
                for target, output in targets:
                    name = f"{target}, {workers} worker" + "s" * (workers > 1)
                    run = partial(convert, source, output, target, Settings(side), workers=workers, force=True)
                    report(what, name, source, options.repeats, run)


def report(what: str, name: str, source: Source, repeats: int, run: Callable[[], object]) -> None:
    """Print the best rate of several runs."""
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - start)
    print(f"{what:<20}{name:<20}{len(source) / best:>9,.0f} images/s")


def pillow_loop(source: Source, root: Path, side: int | None) -> None:
    """Decode every file; write it as it is or resized."""
    output = root / "loop"
    shutil.rmtree(output, ignore_errors=True)
    output.mkdir()
    for index in range(len(source)):
        path = source.path / source.names[index]
        with Image.open(path) as image:
            pixels = image.convert("RGB")
        if side:
            pixels.resize(target_size(*pixels.size, side)).save(output / f"{index}.jpg", quality=95)
        else:
            shutil.copyfile(path, output / f"{index}.jpg")


if __name__ == "__main__":
    main()
