"""Time a training step, and how close it comes to what the card can do.

    python benchmarks/step.py                                  # any machine; on a GPU ResNet-50 at 224 pixels
    python benchmarks/step.py --methods moco --batch-sizes 256 --executions eager graph compiled fused
    python benchmarks/step.py --kinds cocor --options none composite-size=128 composite-size=128,mmnn-every=4
    python benchmarks/step.py --json out.json

Rows: {plain method, + CoCor} x methods x executions (see ``cocor/step/compile.py``) x images a GPU, and CoCor with each
of --options (see ``cocor/step/subsample.py``), several of which are joined by commas. Batches are noise that lies on
the device already: no loader is measured (``benchmarks/throughput.py`` does that). The labelled batch is a quarter of
the batch, the MMNN learns in every step unless an option says otherwise, and its gradient is the exact one.

- images/s: the median of three windows of --steps steps, after the steps that compile and record; ±: the range over the
  median. Wrong if the card is shared, or hot: compare rows of one run.
- F/s: forward-equivalents a second. A forward pass counts 1, with its backward pass 3; MoCo needs 4 an image (key 1,
  query 3), SimSiam 6; CoCor adds 1 for the original, 3 a length, and 3 for each labelled image. Smaller composites
  count in proportion to their pixels, what is not part of every step by how often it is.
- of card: F/s relative to a bare backbone's passes forward and back on batches of the same size, executed alike. Above
  100 % the step profits from passes side by side.
- other: the share of the step that is not passes of the encoder: 1 - (the same passes alone) / (step).
- memory: GiB of tensors at the peak. start: seconds until every kind of step is recorded (less from a full cache).
"""

import argparse
import gc
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])

from benchmarks.common import Column, describe_machine, header, machine_line, results_file, row, script, write_json
from cocor.config.options import Config, Execution, labelled_batch_size
from cocor.config.parse import convert
from cocor.config.resolve import resolve
from cocor.distributed.collectives import World
from cocor.methods import METHODS
from cocor.methods.base import batch_statistics_only
from cocor.models import build_method, build_target
from cocor.monitor.profile import costs
from cocor.step.compile import choose, executable
from cocor.step.composites import Streams
from cocor.step.cudagraph import WARM_UP
from cocor.step.step import TrainingStep
from loaders.arguments import Parser, above_zero, nearest, positive, writable
from loaders.batch import Batch
from loaders.errors import UserError
from loaders.files import check_file

COLUMNS = {  # by the keys of a row
    "name": Column("step", -18), "execution": Column("execution", -10), "batch_size": Column("batch", 6),
    "images_per_s": Column("images/s", 9, ",.0f"), "spread": Column("±", 5, ".1%"),
    "forward_equivalents_per_s": Column("F/s", 8, ",.0f"), "of_card": Column("of card", 8, ".0%"),
    "other": Column("other", 7, ".1%"), "memory_gib": Column("memory", 7, ".1f"), "start_s": Column("start", 7, ".0f"),
    "option": Column("option", -20),
}  # fmt: skip
OPTIONS = ("composite-size", "lengths-per-step", "mmnn-every")


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line (default: this process's)."""
    on_gpu = torch.cuda.is_available()
    parser = Parser("step.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--backbone", default="resnet50" if on_gpu else "test_resnet")
    add("--size", type=positive, default=224 if on_gpu else 64, help="side of the images in pixels")
    add("--batch-sizes", type=positive, nargs="+", default=[256, 64] if on_gpu else [16])
    add("--methods", nargs="+", choices=sorted(METHODS), default=["moco", "simsiam"])
    add("--kinds", nargs="+", choices=["plain", "cocor"], default=["plain", "cocor"])
    add("--options", nargs="+", default=["none"], metavar="KEY=VALUE",
        help=f"rows of + CoCor with {', '.join(OPTIONS)}; none: without")  # fmt: skip
    add("--executions", nargs="+", choices=get_args(Execution)[1:], default=["eager", "fused"] if on_gpu else ["eager"])
    add("--lengths", type=positive, nargs="+", default=[1, 2, 3], help="of the composites")
    add("--steps", type=positive, default=20 if on_gpu else 2, help="in each of three windows")
    add("--seconds", type=above_zero, default=1e9, help="begin no further row after this time")
    add("--json", type=writable, help="write the figures here (default on a GPU: results/step-CARD.json)")
    return parser.parse_all(argv)


def _overrides(option: str) -> dict[str, int]:
    """Parse ``composite-size=128,mmnn-every=4`` into values of the configuration."""
    values = {}
    for word in option.split(",") if option != "none" else ():
        name, _, value = word.partition("=")
        if name not in OPTIONS:
            remedy = nearest(name, OPTIONS) or f"; there are {', '.join(OPTIONS)}"
            raise UserError(f"--options {word}: no option of a step{remedy}")
        values[name.replace("-", "_")] = convert(f"--options {name}", value, int)
    return values


def _config(options: argparse.Namespace, method: str, kind: str, option: str, batch_size: int, on_gpu: bool) -> Config:
    splits = max(n for n in (8, 4, 2, 1) if batch_size // n >= 2 or n == 1)
    return resolve({
        "method": method, "backbone": options.backbone, "image_size": options.size, "batch_size": batch_size,
        "lengths": tuple(options.lengths), "consistency": "softplus" if kind == "cocor" else "none",
        "constants": tuple(0.8 - 0.05 * n for n in range(max(options.lengths))),
        "queue_size": 65536 if on_gpu else 1024, "key_bn_splits": splits, "mmnn_wait_epochs": 0,
        "precision": "bf16" if on_gpu else "fp32", "epochs": 100, **_overrides(option),
    })  # fmt: skip


def main() -> None:
    options = arguments()
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    torch.backends.cudnn.benchmark = on_gpu
    torch.set_float32_matmul_precision("high")
    machine = describe_machine()
    path = options.json or (results_file("step", machine) if on_gpu else None)
    if path is not None:
        check_file("--json", path)
    kinds = [(kind, word) for kind in options.kinds for word in (options.options if kind == "cocor" else ["none"])]
    configs = [
        (execution, option, _config(options, method, kind, option, batch_size, on_gpu))
        for batch_size, method, (kind, option), execution in itertools.product(
            options.batch_sizes, options.methods, kinds, options.executions
        )
    ]
    title = f"{options.backbone}, {options.size} pixels"
    print(machine_line(machine), title, "", header(COLUMNS.values()), sep="\n", flush=True)
    rows: list[dict[str, Any]] = []
    given = {key: str(value) if isinstance(value, Path) else value for key, value in vars(options).items()}
    begin = time.perf_counter()
    for execution, option, config in configs:
        if time.perf_counter() - begin > options.seconds:
            print(f"{options.seconds:.0f} seconds are over; the rest is left out", flush=True)
            break
        try:
            rows.append(measure_row(config, execution, options.steps, device) | {"option": option})
            name = config.method + (" + cocor" if rows[-1]["cocor"] else "")
            print(row(COLUMNS.values(), [({"name": name} | rows[-1])[key] for key in COLUMNS]), flush=True)
        except RuntimeError as error:
            if not any(isinstance(cause, torch.OutOfMemoryError) for cause in (error, error.__context__)):
                raise
            what = f"{config.method}, consistency {config.consistency}, options {option}, {execution}"
            print(f"{what}, {config.batch_size} images: does not fit into the GPU's memory", flush=True)
        if path is not None:
            write_json(path, {"machine": machine, "arguments": given, "rows": rows})
        gc.collect()
        torch._dynamo.reset()
        if on_gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()


CLASSES, WINDOWS, STEPS_PER_EPOCH = 1000, 3, 10_000


def measure_row(config: Config, execution: Execution, steps: int, device: torch.device) -> dict[str, Any]:
    """Measure one row, in windows of ``steps`` steps."""
    begin = time.perf_counter()
    precision = torch.bfloat16 if config.precision == "bf16" else torch.float32
    world = World(0, 0, 1, device)
    method, target = build_method(config, world), build_target(config, world)
    step = TrainingStep(config, method, target, CLASSES, steps_per_epoch=STEPS_PER_EPOCH, precision=precision)
    batch = noise(config, config.batch_size, device, precision)
    labelled = noise(config, labelled_batch_size(config, 1), device, precision, plain=True)
    run = executable(step, choose(replace(config, execution=execution), world, steps))
    numbers = itertools.count()
    for _ in range((WARM_UP + 2) * config.mmnn_every):
        run(batch, labelled, next(numbers))
    _wait(device)
    start = time.perf_counter() - begin
    window = -(-steps // step.subsample.cycle) * step.subsample.cycle
    seconds, spread = timed(lambda: run(batch, labelled, next(numbers)), window, device)
    allocated, reserved = None, None
    if device.type == "cuda":
        allocated, reserved = torch.cuda.max_memory_allocated() / 2**30, torch.cuda.max_memory_reserved() / 2**30
    recorded = execution in ("graph", "fused")
    passes = seconds_of_passes(step, batch, labelled, recorded, steps)
    card = timed(_warmed_up(lambda: forward_backward(step, batch.original), recorded, device), steps, device)[0]
    units = len(batch.index) * sum(costs(config, 1).values()) / seconds
    step.streams.close()
    return {
        "method": config.method, "cocor": target is not None, "execution": execution, "batch_size": config.batch_size,
        "images_per_s": len(batch.index) / seconds, "spread": spread, "step_ms": 1000 * seconds,
        "forward_equivalents_per_s": units, "card_images_per_s": len(batch.index) / card,
        "of_card": units / (3 * len(batch.index) / card), "other": 1 - passes / seconds,
        "memory_gib": allocated, "reserved_gib": reserved, "start_s": start,
    }  # fmt: skip


def noise(config: Config, count: int, device: torch.device, dtype: torch.dtype, plain: bool = False) -> Batch:
    """Draw a batch of noise; ``plain``: the original alone, as of labelled batches."""
    generator = torch.Generator(device).manual_seed(count)
    lengths = len(config.lengths) if config.has_composites and not plain else 0

    def images(*shape: int) -> Tensor:
        size = (config.image_size, config.image_size, 3)
        return torch.randn(*shape, *size, device=device, dtype=dtype, generator=generator).movedim(-1, -3)

    composition = torch.zeros(lengths, count, 14, dtype=torch.uint8, device=device)
    for at in range(lengths):
        composition[at, :, at % 14] = config.lengths[at]
    label = torch.arange(count, device=device) % CLASSES
    return Batch(images(0 if plain else 2, count), images(count), images(lengths, count), composition, label, label)


def seconds_of_passes(step: TrainingStep, batch: Batch, labelled: Batch, recorded: bool, steps: int) -> float:
    """Time :func:`all_passes`: the mean over steps with a labelled batch and without."""
    shared, every = step.share(batch, labelled, 0)[0], step.config.mmnn_every

    def seconds(labelled: Batch | None) -> float:
        work = _warmed_up(lambda: all_passes(step, shared, labelled), recorded, step.device)
        return timed(work, steps, step.device)[0]

    guided = seconds(labelled)
    return guided if every == 1 else (guided + (every - 1) * seconds(None)) / every


def all_passes(step: TrainingStep, batch: Batch, labelled: Batch | None) -> None:
    """Run the encoder's passes of one step, with the contrastive loss, alone."""
    method, parameters = step.method, step.parameters
    backbone = [p for p in method.backbone.parameters() if p.requires_grad]
    streams = step.streams if step.device.type == "cuda" else Streams()  # threads need a method of their own
    if step.target is not None:
        with step.autocast():
            method.embed_original(batch.original)
        for at, images in enumerate(batch.composites):
            streams.run(at, partial(composite_pass, step, images))
    with step.autocast():
        loss = method.contrastive(batch.views, batch.label)
    torch.autograd.grad(loss, parameters, allow_unused=True)
    streams.join()
    if step.outer is not None and labelled is not None:
        with step.autocast(), batch_statistics_only(method.backbone):
            output = method.backbone(labelled.original).sum()
        torch.autograd.grad(output, backbone)


def composite_pass(step: TrainingStep, images: Tensor) -> None:
    """Run the pass of one length of composites, forward and back."""
    with step.autocast():
        output = step.method.embed_composite(images).sum()
    torch.autograd.grad(output, step.parameters, allow_unused=True)


def forward_backward(step: TrainingStep, images: Tensor) -> None:
    """Run one pass of the backbone, forward and back."""
    backbone = step.method.backbone
    with step.autocast(), batch_statistics_only(backbone):
        output = backbone(images).sum()
    torch.autograd.grad(output, [p for p in backbone.parameters() if p.requires_grad])


def _warmed_up(work: Callable[[], object], recorded: bool, device: torch.device) -> Callable[[], object]:
    """Call ``work`` twice and return it, or its CUDA graph's replay if ``recorded``."""
    if not recorded:
        work()
        work()
        return work
    stream, graph = torch.cuda.Stream(device), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        work()
        work()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        work()
    return graph.replay


def timed(work: Callable[[], object], steps: int, device: torch.device) -> tuple[float, float]:
    """Time ``work``: median seconds over windows of calls, and range over the median."""
    windows = []
    for _ in range(WINDOWS):
        _wait(device)
        begin = time.perf_counter()
        for _ in range(steps):
            work()
        _wait(device)
        windows.append((time.perf_counter() - begin) / steps)
    middle = statistics.median(windows)
    return middle, (max(windows) - min(windows)) / middle


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    script("step.py", main)
