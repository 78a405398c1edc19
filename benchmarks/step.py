"""What a training step costs, and how close it comes to what the card can do.

    python benchmarks/step.py                                  # any machine; on a GPU ResNet-50 at 224 pixels
    python benchmarks/step.py --methods moco --batch-sizes 256 --executions eager graph compiled fused
    python benchmarks/step.py --kinds cocor --options none composite-size=128 composite-size=128,mmnn-every=4
    python benchmarks/step.py --json out.json

Rows: {plain method, + CoCor} x methods x executions (see ``cocor/step/compile.py``) x images a GPU, and CoCor with
each of
--options (see ``cocor/step/subsample.py``), several of which are joined by commas. Batches are noise that lies on
the device
already: no loader is measured (``benchmarks/throughput.py`` does that). The labelled batch is a quarter of the batch,
the MMNN learns in every step unless an option says otherwise, and its gradient is the exact one.

How each figure is taken, and what would make it wrong
- images/s: the median of three windows of --steps steps, after the steps that compile and record; the device has
  finished all of them. ±: the range over the median. Wrong if the card is shared, or hot: compare rows of one run.
- F/s: forward-equivalents a second. A forward pass counts 1, with its backward pass 3; MoCo needs 4 an image (key 1,
  query 3), SimSiam 6; CoCor adds 1 for the original, 3 a length, and 3 for each labelled image. Smaller composites
  count in proportion to their pixels, what is not part of every step by how often it is; windows are whole turns.
- of card: the F/s relative to what the card reaches when it does nothing but pass the backbone forward and back on a
  batch of the same size, executed alike, in the same process. Above 100 % the step profits from passes side by side.
- other: the share of the step that is not passes of the encoder: 1 - (the same passes, with nothing between them) /
  (step). Optimisers, moving average, queue, consistency loss, MMNN, copies; the contrastive loss is timed with its
  passes.
- memory: GiB of tensors at the peak; the JSON file also has what PyTorch reserved.
- start: seconds until every kind of step is recorded, most of it compiling. The compiler keeps its results on disk, so
  a second run starts faster.
"""

import argparse
import gc
import itertools
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from cocor.config.options import Config
from cocor.config.parse import convert, flag
from cocor.config.resolve import resolve
from cocor.distributed.launch import command
from cocor.methods import METHODS
from common import RESULTS, Column, describe_machine, device_slug, header, machine_line, row, write_json
from loaders.arguments import Parser, above_zero, nearest, positive, writable
from loaders.errors import UserError
from loaders.writable import check_file
from step_cost import measure

COLUMNS = (
    Column("step", -18), Column("execution", -10), Column("batch", 6), Column("images/s", 9, ",.0f"),
    Column("±", 5, ".1%"), Column("F/s", 8, ",.0f"), Column("of card", 8, ".0%"), Column("other", 7, ".1%"),
    Column("memory", 7, ".1f"), Column("start", 7, ".0f"), Column("option", -20),
)  # fmt: skip
OPTIONS = ("composite_size", "lengths_per_step", "mmnn_every")


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    on_gpu = torch.cuda.is_available()
    parser = Parser(description="Time the training step.")
    parser.add_argument("--backbone", default="resnet50" if on_gpu else "test_resnet")
    parser.add_argument("--size", type=positive, default=224 if on_gpu else 64, help="side of the images in pixels")
    parser.add_argument("--batch-sizes", type=positive, nargs="+", default=[256, 64] if on_gpu else [16])
    parser.add_argument("--methods", nargs="+", choices=sorted(METHODS), default=["moco", "simsiam"])
    parser.add_argument("--kinds", nargs="+", choices=["plain", "cocor"], default=["plain", "cocor"])
    parser.add_argument("--options", nargs="+", default=["none"], metavar="KEY=VALUE",
                        help=f"rows of + CoCor with {', '.join(map(_word, OPTIONS))}; none: without")  # fmt: skip
    parser.add_argument("--executions", nargs="+", choices=["eager", "compiled", "graph", "fused"],
                        default=["eager", "fused"] if on_gpu else ["eager"])  # fmt: skip
    parser.add_argument("--parallel", action=argparse.BooleanOptionalAction,
                        help="lengths side by side in a recorded step (default: for small batches)")  # fmt: skip
    parser.add_argument("--lengths", type=positive, nargs="+", default=[1, 2, 3], help="of the composites")
    parser.add_argument("--steps", type=positive, default=20 if on_gpu else 2, help="in each of three windows")
    parser.add_argument("--seconds", type=above_zero, default=1e9, help="begin no further row after this time")
    parser.add_argument(
        "--json", type=writable, help="write the figures here (default on a GPU: results/step-CARD.json)"
    )
    return parser.parse_all(argv)


def _overrides(option: str) -> dict[str, int]:
    """``composite-size=128,mmnn-every=4`` as values of the configuration."""
    values = {}
    for word in option.split(",") if option != "none" else ():
        name, _, value = word.partition("=")
        key = name.replace("-", "_")
        if key not in OPTIONS:
            known = list(map(_word, OPTIONS))
            remedy = nearest(name, known) or f"; there are {', '.join(known)}"
            raise UserError(f"--options {word}: no option of a step{remedy}")
        values[key] = convert(f"--options {name}", value, int)
    return values


def _word(key: str) -> str:
    return flag(key).removeprefix("--")


def _config(
    arguments: argparse.Namespace, method: str, kind: str, option: str, batch_size: int, on_gpu: bool
) -> Config:
    splits = max(n for n in (8, 4, 2, 1) if batch_size // n >= 2 or n == 1)
    return resolve({
        "method": method, "backbone": arguments.backbone, "image_size": arguments.size, "batch_size": batch_size,
        "lengths": tuple(arguments.lengths), "consistency": "softplus" if kind == "cocor" else "none",
        "constants": tuple(0.8 - 0.05 * n for n in range(max(arguments.lengths))),
        "queue_size": 65536 if on_gpu else 1024, "key_bn_splits": splits, "mmnn_wait_epochs": 0,
        "precision": "bf16" if on_gpu else "fp32", "epochs": 100, **_overrides(option),
    })  # fmt: skip


def _show(result: dict[str, Any]) -> str:
    name = result["method"] + (" + cocor" if result["cocor"] else "")
    keys = ("execution", "batch_size", "images_per_s", "spread", "forward_equivalents_per_s", "of_card", "other",
            "memory_gib", "start_s", "option")  # fmt: skip
    return row(COLUMNS, [name, *(result[key] for key in keys)])


def run(argv: Sequence[str] | None = None) -> None:
    arguments = _parse(argv)
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    torch.backends.cudnn.benchmark = on_gpu
    torch.set_float32_matmul_precision("high")
    machine = describe_machine()
    print(f"{machine_line(machine)}\n{arguments.backbone}, {arguments.size} pixels\n\n{header(COLUMNS)}", flush=True)
    path = arguments.json or (RESULTS / f"step-{device_slug(machine)}.json" if on_gpu else None)
    if path is not None:
        check_file("--json", path)
    results: list[dict[str, Any]] = []
    begin = time.perf_counter()
    kinds = [(kind, word) for kind in arguments.kinds for word in (arguments.options if kind == "cocor" else ["none"])]
    configs = [
        (execution, option, _config(arguments, method, kind, option, batch_size, on_gpu))
        for batch_size, method, (kind, option), execution in itertools.product(
            arguments.batch_sizes, arguments.methods, kinds, arguments.executions
        )
    ]
    for execution, option, config in configs:
        if time.perf_counter() - begin > arguments.seconds:
            print(f"{arguments.seconds:.0f} seconds are over; the rest is left out", flush=True)
            break
        try:
            results.append(measure(config, execution, arguments.steps, device, arguments.parallel) | {"option": option})
            print(_show(results[-1]), flush=True)
        except RuntimeError as error:
            if not any(isinstance(cause, torch.OutOfMemoryError) for cause in (error, error.__context__)):
                raise
            what = f"{config.method}, consistency {config.consistency}, options {option}, {execution}"
            print(f"{what}, {config.batch_size} images: does not fit into the GPU's memory", flush=True)
        if path is not None:
            write_json(path, {"machine": machine, "arguments": _plain(arguments), "rows": results})
        gc.collect()
        torch._dynamo.reset()
        if on_gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()


def _plain(arguments: argparse.Namespace) -> dict[str, Any]:
    return {key: str(value) if isinstance(value, Path) else value for key, value in vars(arguments).items()}


def main(argv: Sequence[str] | None = None) -> int:
    """The command; 2 for a user's mistake."""
    return command("step.py", lambda: run(argv))


if __name__ == "__main__":
    sys.exit(main())
