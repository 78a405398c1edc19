"""How training speed grows with the number of GPUs, and what real data costs it.

    python benchmarks/scaling.py --data imagenet/train                # 1, 2, 4, ... GPUs, as many as there are
    python benchmarks/scaling.py --gpus 1 2 --batch-sizes 64 --loaders synthetic dali --json out.json

Each row trains MoCo + CoCor (ResNet-50, bfloat16) in one process a GPU, as ``cocor-train --gpus N`` does: keys
gathered and shuffled over all GPUs, gradients averaged. The images a GPU stay the same.

- images/s: of all GPUs together; times: this rate over that of one GPU with the same loader and batch.
- of finished: this rate over that of training on finished batches that lie on the GPU already, measured before and
  after in the same processes; the rest is what the loader costs.
- 50 epochs, h: hours for 50 epochs of ImageNet-1K at this rate.
What would make it wrong: see ``throughput.py``, which measures the rows. GPUs that share their CPU cores with other
programs scale worse.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import images
import throughput
from cells import Absent, Measured, Settings, measure
from cocor.distributed.launch import command
from common import RESULTS, Column, describe_machine, device_slug, header, machine_line, row, write_json
from images import open_images
from loaders.arguments import Parser, above_zero, positive, writable
from loaders.errors import UserError
from loaders.files import check_file
from photographs import make_photographs
from processes import alone
from sources import Contender

COLUMNS = {  # by the keys of ``_describe``
    "loader": Column("loader", -10),
    "images_per_gpu": Column("a GPU", 6),
    "gpus": Column("GPUs", 5),
    "images_per_s": Column("images/s", 9, ",.0f"),
    "spread": Column("±", 5, ".1%"),
    "times": Column("times", 6, ".2f"),
    "of_finished": Column("of finished", 11, ".1%"),
    "cores": Column("cores", 6, ".1f"),
    "gib": Column("GiB", 6, ".1f"),
    "hours": Column("50 epochs, h", 12, ".2f"),
}
_IMAGENET = 1_281_167


def main() -> None:
    options = arguments()
    machine = alone(describe_machine)
    if not machine["gpus"]:
        raise UserError("there is no GPU here; benchmarks/throughput.py measures CPUs")
    gpus = sorted(options.gpus or [n for n in (1, 2, 4, 8) if n <= machine["gpus"]])  # one first, as the others need it
    if gpus[-1] > machine["gpus"]:
        raise UserError(f"--gpus {' '.join(map(str, gpus))}: there are {machine['gpus']} here")
    target = options.json or RESULTS / f"scaling-{device_slug(machine)}.json"
    check_file("--json", target)
    chosen = alone(open_images, options.data or make_photographs(512), 512)
    print(machine_line(machine), images.line(images.describe(chosen)), header(COLUMNS.values()), sep="\n", flush=True)
    rows: list[dict[str, Any]] = []
    single: dict[tuple[str, int], float] = {}
    for settings, loader in _cells(options, gpus, machine):
        cell = measure(loader, "step", chosen, settings)
        if isinstance(cell, Absent):
            print(f"{loader}, {settings.ranks} GPUs: {cell.reason}", flush=True)
            continue
        result = _describe(cell, settings, single)
        rows.append(result)
        print(row(COLUMNS.values(), [result[key] for key in COLUMNS]), flush=True)
        write_json(target, {"benchmark": "scaling", "machine": machine, "rows": rows})


def _cells(
    options: argparse.Namespace, gpus: Sequence[int], machine: dict[str, Any]
) -> Iterator[tuple[Settings, Contender]]:
    for loader in options.loaders:
        for size in options.batch_sizes:
            for ranks in gpus:
                given = ["--gpus", str(ranks), "--batch-size", str(size * ranks), "--seconds", str(options.seconds)]
                settings = throughput.settings_of(throughput.arguments(given), machine)
                yield replace(settings, execution=options.execution, backbone=options.backbone), loader


def _describe(cell: Measured, settings: Settings, single: dict[tuple[str, int], float]) -> dict[str, Any]:
    """A row; ``single`` remembers the rate of one GPU, by loader and images a GPU."""
    images_per_gpu = settings.batch_size // settings.ranks
    if settings.ranks == 1:
        single[cell.loader, images_per_gpu] = cell.samples_per_s
    one = single.get((cell.loader, images_per_gpu))
    return {
        "loader": cell.loader,
        "images_per_gpu": images_per_gpu,
        "gpus": settings.ranks,
        "images_per_s": cell.samples_per_s,
        "spread": cell.spread if cell.windows > 1 else None,
        "times": None if one is None else cell.samples_per_s / one,
        "of_finished": None if cell.gpu_share is None else 1 - cell.gpu_share,
        "cores": cell.cores_busy,
        "gib": cell.gpu_reserved_gib,
        "hours": 50 * _IMAGENET / cell.samples_per_s / 3600,
        "settings": asdict(settings),
    }


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line (default: this process's), parsed."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder of images (default: JPEG files made for the purpose)")
    parser.add_argument("--gpus", type=positive, nargs="+", help="numbers of GPUs (default: 1, 2, 4, 8 if there are)")
    parser.add_argument("--batch-sizes", type=positive, nargs="+", default=[256, 64], help="images a GPU")
    parser.add_argument("--loaders", nargs="+", choices=["synthetic", "dali", "ffcv", "torch"],
                        default=["synthetic", "dali"])  # fmt: skip
    parser.add_argument("--execution", choices=["eager", "compiled", "graph", "fused"], default="fused")
    parser.add_argument("--backbone", default="resnet50", help="timm name of the trained encoder")
    parser.add_argument("--seconds", type=above_zero, default=6.0, help="timed, of every row")
    parser.add_argument(
        "--json", type=writable, metavar="FILE", help="default: benchmarks/results/scaling-<device>.json"
    )
    return parser.parse_all(argv)


if __name__ == "__main__":
    sys.exit(command("scaling.py", main))
