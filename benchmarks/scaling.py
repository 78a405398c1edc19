"""Time how training speed grows with GPUs, and what real data costs it.

    python benchmarks/scaling.py --data imagenet/train                # 1, 2, 4, ... GPUs, as many as there are
    python benchmarks/scaling.py --gpus 1 2 --batch-sizes 64 --loaders synthetic dali --json out.json

Each row trains MoCo + CoCor (ResNet-50, bfloat16) in one process a GPU, as ``cocor-train --gpus N`` does.

images/s is of all GPUs together; times: over the rate of one GPU with the same loader and batch; of finished: over the
rate of training on finished batches that lie on the GPU already, in the same processes (the rest is what the loader
costs); hours for 50 epochs of ImageNet-1K. What would make it wrong: see ``throughput.py``; GPUs that share their CPU
cores with other programs scale worse.
"""

import argparse
import itertools
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])

from benchmarks import throughput
from benchmarks.common import Column, describe_machine, header, machine_line, results_file, row, script, write_json
from benchmarks.images import describe, line, make_photographs, open_images
from benchmarks.loading.cases import Absent, Measured, Settings, measure
from benchmarks.processes import alone
from cocor.config.options import Execution
from loaders.arguments import Parser, above_zero, positive, writable
from loaders.errors import UserError
from loaders.files import check_file
from loaders.open import LoaderName

COLUMNS = {  # by the keys of ``row_of``
    "loader": Column("loader", -10), "images_per_gpu": Column("a GPU", 6), "gpus": Column("GPUs", 5),
    "images_per_s": Column("images/s", 9, ",.0f"), "spread": Column("±", 5, ".1%"), "times": Column("times", 6, ".2f"),
    "of_finished": Column("of finished", 11, ".1%"), "cores": Column("cores", 6, ".1f"),
    "gib": Column("GiB", 6, ".1f"), "hours": Column("50 epochs, h", 12, ".2f"),
}  # fmt: skip
_IMAGENET = 1_281_167


def main() -> None:
    options = arguments()
    machine = alone(describe_machine)
    if not machine["gpus"]:
        raise UserError("there is no GPU here; benchmarks/throughput.py measures CPUs")
    gpus = sorted(options.gpus or [n for n in (1, 2, 4, 8) if n <= machine["gpus"]])  # one first, as the others need it
    if gpus[-1] > machine["gpus"]:
        raise UserError(f"--gpus {' '.join(map(str, gpus))}: there are {machine['gpus']} here")
    target = options.json or results_file("scaling", machine)
    check_file("--json", target)
    chosen = alone(open_images, options.data or make_photographs(512), 512)
    print(machine_line(machine), line(describe(chosen)), header(COLUMNS.values()), sep="\n", flush=True)
    rows: list[dict[str, Any]] = []
    single: dict[tuple[str, int], float] = {}
    for loader, size, ranks in itertools.product(options.loaders, options.batch_sizes, gpus):
        given = ["--gpus", str(ranks), "--batch-size", str(size * ranks), "--seconds", str(options.seconds)]
        given += ["--execution", options.execution, "--backbone", options.backbone]
        settings = throughput.settings_of(throughput.arguments(given), machine)
        case = measure(loader, "step", chosen, settings)
        if isinstance(case, Absent):
            print(f"{loader}, {settings.ranks} GPUs: {case.reason}", flush=True)
            continue
        rows.append(row_of(case, settings, single))
        print(row(COLUMNS.values(), [rows[-1][key] for key in COLUMNS]), flush=True)
        write_json(target, {"benchmark": "scaling", "machine": machine, "rows": rows})


def row_of(case: Measured, settings: Settings, single: dict[tuple[str, int], float]) -> dict[str, Any]:
    """Make a row; ``single`` remembers rates of one GPU, by loader and images a GPU."""
    images_per_gpu = settings.batch_size // settings.ranks
    if settings.ranks == 1:
        single[case.loader, images_per_gpu] = case.samples_per_s
    one = single.get((case.loader, images_per_gpu))
    return {
        "loader": case.loader, "images_per_gpu": images_per_gpu, "gpus": settings.ranks,
        "images_per_s": case.samples_per_s, "spread": case.spread if case.windows > 1 else None,
        "times": None if one is None else case.samples_per_s / one,
        "of_finished": None if case.gpu_share is None else 1 - case.gpu_share, "cores": case.cores_busy,
        "gib": case.gpu_reserved_gib, "hours": 50 * _IMAGENET / case.samples_per_s / 3600, "settings": asdict(settings),
    }  # fmt: skip


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line (default: this process's)."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--data", type=Path, help="folder of images (default: JPEG files made for the purpose)")
    add("--gpus", type=positive, nargs="+", help="numbers of GPUs (default: 1, 2, 4, 8 if there are)")
    add("--batch-sizes", type=positive, nargs="+", default=[256, 64], help="images a GPU")
    add("--loaders", nargs="+", choices=get_args(LoaderName), default=["synthetic", "dali"])
    add("--execution", choices=get_args(Execution)[1:], default="fused")
    add("--backbone", default="resnet50", help="timm name of the trained encoder")
    add("--seconds", type=above_zero, default=6.0, help="timed, of every row")
    add("--json", type=writable, metavar="FILE", help="default: benchmarks/results/scaling-<device>.json")
    return parser.parse_all(argv)


if __name__ == "__main__":
    script("scaling.py", main)
