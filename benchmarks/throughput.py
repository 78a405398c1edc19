"""Time how fast batches come: loaders x stages of the data path, in one table.

    python benchmarks/throughput.py                         # any machine; makes its own JPEG files
    python benchmarks/throughput.py --data imagenet/train --json out.json
    python benchmarks/throughput.py --loader dali --loader torchvision --stage composites
    python benchmarks/throughput.py --quick                 # under a minute on two cores: does it all work?

Loaders (rows)
  torch, dali, ffcv  this project's: every image decoded once, six views by one program (numba on CPUs, CUDA on GPUs)
  synthetic          the same without files: noise crops, so the views' cost alone
  dali-auto-aug      DALI's own operators: colour twist, blur, and RandAugment from nvidia.dali.auto_aug for composites
  torchvision        v2 transforms on Pillow images in a plain DataLoader (in batches of 64: the rate is the same)
  torchvision-gpu, kornia  v2 transforms, or kornia's, on GPU tensors that nvJPEG decoded
  solo-learn, lightly      two contrastive views: the former's DALI pipeline, the latter's transform in a DataLoader
  libjpeg-turbo      decoding from memory alone, one process a core
Stages (columns): decode; + crops (three, resized, flipped); + contrastive views (jitter, grey, blur on two of them);
+ composites (1, 2 and 3 operations on the third: six views, normalised); + training step (MoCo + CoCor: ResNet-50 in
bfloat16 on a GPU; on a CPU, only if asked for, ResNet-18 in float32).

How each figure is taken, and what would make it wrong
- Every case runs in new processes, one a GPU. Images come from the page cache.
- With --latency-ms loaders of image files are measured again on first reads: each time that a file is opened it is
  dropped from the page cache, and comes so many milliseconds late. A .beton file is mapped, so there is no such row.
- samples/s: finished batches over wall-clock time, in up to three windows of --seconds in all, after warm-up; median,
  and ± the range over the median. Wrong if other programs use the machine: compare rows of one run only.
- views/s: samples/s times the stage's views (3, 3, 6, 6; of two peers 2). a core: samples/s over the cores busy.
- cores: CPU time of the process and its descendants over wall-clock time, both between the same two readings.
- taken: the share of the training step that the loader costs: 1 - (step on batches made before) / (step on the
  loader's), both in one process, the former before and after.
- p50, p99: milliseconds from one finished batch to the next. Worker processes and DALI deliver in bursts: a p50 near 0
  and a long p99 are normal then.
- reserved, card: GiB reserved by torch at the peak, and used on the card at the end by everything. Of several GPUs the
  rates and cores add up, and the worst latency and memory are shown.
Peers draw their own random numbers, so they do equal work on average, not the same.
"""

import argparse
import itertools
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, get_args

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])

from benchmarks.common import describe_machine, header, machine_line, results_file, script, write_json
from benchmarks.images import describe, line, make_photographs, open_images
from benchmarks.loading import first_reads
from benchmarks.loading.cases import Settings, measure
from benchmarks.loading.contenders import CONTENDERS
from benchmarks.loading.report import COLUMNS, Case, case_line, ratio_lines, ratios, summary
from benchmarks.loading.stages import STAGES, Stage
from benchmarks.processes import alone
from cocor.config.options import Execution
from loaders.arguments import Parser, above_zero, not_negative, positive, share, writable
from loaders.errors import UserError
from loaders.files import check_file


def main() -> None:
    started, options = time.monotonic(), arguments()
    if options.data is not None and not options.data.exists():
        raise UserError(f"--data {options.data}: no such folder")
    if options.latency_ms:
        first_reads.prepare()
    machine = alone(describe_machine)
    settings = settings_of(options, machine)
    targets = [] if options.json is None else [options.json]
    if options.save:
        targets.append(results_file("throughput", machine))
        check_file("--save", targets[-1])
    number = options.images or (64 if options.quick else 512)
    chosen = alone(open_images, options.data or make_photographs(number), number)
    cases, data = list[Case](), describe(chosen)
    print(machine_line(machine), line(data), settings, header(COLUMNS), sep="\n", flush=True)

    for contender, stage, latency_ms in places_of(options, settings):
        cases.append(measure(contender, stage, chosen, replace(settings, latency_ms=latency_ms)))
        print(case_line(cases[-1]), flush=True)
        content = {"benchmark": "throughput", "machine": machine, "data": data, "settings": asdict(settings)}
        content |= {"cells": [asdict(case) for case in cases], "ratios": list(ratios(cases))}
        for target in targets:
            write_json(target, content)
    print("", summary(cases), "", *ratio_lines(cases), sep="\n", flush=True)
    print(f"took {time.monotonic() - started:.0f} s")


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line (default: this process's)."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--data", type=Path, help="folder of images (default: JPEG files made for the purpose)")
    add("--images", type=positive, help="most images to use (default: 512)")
    add("--loader", action="append", choices=CONTENDERS, help="only this one; may be repeated")
    add("--stage", action="append", choices=STAGES, help="only this one; may be repeated")
    add("--gpus", type=not_negative, help="GPUs to use; 0 for none (default: 1 if there is one)")
    add("--batch-size", type=positive, help="images a batch, over all GPUs (default: 256 a GPU, 64 on CPUs)")
    add("--size", type=positive, help="side of the views in pixels (default: 224)")
    add("--workers", type=positive, help="threads or processes of a loader (default: one a core)")
    add("--seconds", type=above_zero, help="timed, of every case (default: 6)")
    add("--hw-decoder-load", type=share, default=0.65, help="share of JPEGs for the GPU's decoder")
    add("--latency-ms", type=not_negative, nargs="+", default=[], help="also measure first reads, so late")
    add("--backbone", help="timm name of the trained encoder (default: resnet50; on CPUs resnet18)")
    add("--execution", choices=get_args(Execution)[1:], help="of the training step (default: graph; eager on CPUs)")
    add("--quick", action="store_true", help="small and short: no measurement")
    add("--json", type=writable, metavar="FILE", help="write all figures to FILE, after every row")
    add("--save", action="store_true", help="write them to benchmarks/results/throughput-<device>.json")
    return parser.parse_all(argv)


def settings_of(options: argparse.Namespace, machine: dict[str, Any]) -> Settings:
    """Fill in defaults that depend on the machine. UserError for too many GPUs."""
    gpus = min(1, machine["gpus"]) if options.gpus is None else options.gpus
    if gpus > machine["gpus"]:
        raise UserError(f"--gpus {gpus}: there are {machine['gpus']} here")
    ranks, quick = max(1, gpus), options.quick
    batch_size = options.batch_size or ranks * (8 if quick else 256 if gpus else 64)
    if batch_size % ranks or batch_size // ranks < 2:
        raise UserError(f"--batch-size {batch_size}: take a multiple of {ranks} that leaves every GPU two or more")
    return Settings(
        on_gpu=gpus > 0, ranks=ranks, batch_size=batch_size, size=options.size or (32 if quick else 224),
        workers=options.workers or max(1, machine["cores"] // ranks),
        seconds=options.seconds or (0.3 if quick else 6.0), hw_decoder_load=options.hw_decoder_load,
        backbone=options.backbone or ("test_resnet" if quick else "resnet50" if gpus else "resnet18"),
        execution=options.execution or ("graph" if gpus else "eager"),
    )  # fmt: skip


def places_of(options: argparse.Namespace, settings: Settings) -> Iterator[tuple[str, Stage, float | None]]:
    """Yield the cases to measure; what is for a GPU, and training, on a CPU only if asked for."""
    stages: Sequence[Stage] = options.stage or (STAGES if settings.on_gpu or options.quick else STAGES[:-1])
    for name in options.loader or CONTENDERS:
        contender = CONTENDERS[name]
        if settings.on_gpu or options.loader or not contender.for_gpus:
            latencies = [None, *options.latency_ms] if contender.opens_files else [None]
            yield from itertools.product((name,), (stage for stage in contender.stages if stage in stages), latencies)


if __name__ == "__main__":
    script("throughput.py", main)
