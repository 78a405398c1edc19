"""Images per second of ``cocor-prep convert``, beside a plain Pillow loop that does the same work in one process.

    python benchmarks/prep_rates.py --data FOLDER

Files are in the page cache. The loop reads and decodes each image and writes it to a file of its own; it neither checks
anything, nor flushes to the disk, nor writes an index. All contestants run in turn, several times over, and the best of
each counts, so that a busy machine is busy for all; outputs are removed before the clock starts. The last column is
images a second of CPU time, of all processes together, relative to the loop: it says what the work costs, whoever else
wants the cores.
"""

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from PIL import Image

from cocor.distributed.launch import command
from loaders.arguments import Parser, positive
from loaders.cpus import available_cores
from loaders.files import check_folder
from loaders.prep.convert import Target, convert
from loaders.prep.encode import Settings, target_size
from loaders.prep.source import Source
from loaders.prep.sources import open_source


def main() -> None:
    """Print a table."""
    parser = Parser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--data", type=Path, required=True, help="class folders of images")
    parser.add_argument("--shorter-side", type=positive, default=256)
    parser.add_argument("--repeats", type=positive, default=3)
    parser.add_argument("--work", type=Path, help="where to write (default: beside the data)")
    options = parser.parse_all()
    work = options.work or options.data.parent
    check_folder("--work", work)
    source = open_source(options.data)
    for name in source.names:
        (source.path / name).read_bytes()  # into the page cache
    print(f"{len(source):,} images, {available_cores()} cores, best of {options.repeats}")
    with tempfile.TemporaryDirectory(dir=work) as place:
        root = Path(place, "output")
        root.mkdir()
        for side in (None, options.shorter_side):
            what = f"shorter side {side}" if side else "sizes kept"
            report(source, root, what, contestants(source, root, side), options.repeats)


def contestants(source: Source, root: Path, side: int | None) -> dict[str, Callable[[], object]]:
    """What is timed, by name; the Pillow loop first."""
    runs: dict[str, Callable[[], object]] = {"Pillow loop": partial(pillow_loop, source, root, side)}
    targets: list[tuple[Target, Path]] = [("beton", root / "x.beton"), ("folder", root / "x")]
    for workers in sorted({1, available_cores()}):
        for target, output in targets:
            run = partial(convert, source, output, target, Settings(side), workers=workers)
            runs[f"{target}, {workers} worker" + "s" * (workers > 1)] = run
    return runs


def report(source: Source, root: Path, what: str, runs: dict[str, Callable[[], object]], repeats: int) -> None:
    """Print the best rate of each run, and its ratio to the first."""
    wall, cpu = {name: float("inf") for name in runs}, {name: float("inf") for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            shutil.rmtree(root)
            root.mkdir()
            start, spent = time.perf_counter(), cpu_seconds()
            run()
            wall[name] = min(wall[name], time.perf_counter() - start)
            cpu[name] = min(cpu[name], cpu_seconds() - spent)
    first = next(iter(runs))
    for name in runs:
        ratios = f"{wall[first] / wall[name]:>6.2f} x loop{cpu[first] / cpu[name]:>8.2f} x loop a CPU second"
        print(f"{what:<20}{name:<20}{len(source) / wall[name]:>9,.0f} images/s{ratios}")


def cpu_seconds() -> float:
    """CPU time of this process and of its children that have ended."""
    return sum(os.times()[:4])


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


if __name__ == "__main__":
    sys.exit(command("prep_rates.py", main))
