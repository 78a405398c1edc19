"""Views per core: the CPU executor against Pillow and torchvision running the same programs.

    python benchmarks/executor.py
    python benchmarks/executor.py --samples 32 --repeats 3 --json results/executor.json

Both get the same 224-pixel crops, flips and programs of the default plan (two MoCo v2 views, the original, composites
of 1, 2 and 3) and end with normalised float32. The baseline is what a training script would do: Pillow for the basic
augmentations, torchvision's transforms on PIL images for jitter, grey and blur, ToTensor and Normalize. ``box blur``
replaces torchvision's Gaussian blur by ImageFilter.GaussianBlur, Pillow's faster approximation. Decoding, cropping and
drawing the programs are not included.

A figure is the CPU time of one thread, PyTorch's work included, so that other load on the machine matters little. It is
the median over the repeats, in which the sides take turns.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageFilter

from cocor.cli import command
from common import Column, describe_machine, header, machine_line, row, write_json
from loaders.arguments import Parser, not_negative, positive, writable
from loaders.batch import IMAGENET_MEAN, IMAGENET_STD
from loaders.kernels import pillow
from loaders.kernels.cpu import CpuExecutor
from loaders.kernels.lower import lower
from loaders.views.ops import Op
from loaders.views.plan import ViewLayout, ViewPlan
from photographs import make_photographs

COLUMNS = {  # by the keys of ``measure``
    "views": Column("views", -24),
    "pillow_ms": Column("Pillow ms", 11, ".3f"),
    "box_blur_ms": Column("box blur ms", 12, ".3f"),
    "cocor_ms": Column("cocor ms", 10, ".3f"),
    "ratio": Column("ratio", 7, ".1f"),
    "box_ratio": Column("box ratio", 10, ".1f"),
}


@dataclass(frozen=True)
class Work:
    """Some views of all samples: the inputs of both sides. Pillow takes magnitudes, the executor lowers them first."""

    name: str
    layout: ViewLayout
    crops: NDArray[np.uint8]
    flips: NDArray[np.uint8]
    codes: NDArray[np.uint8]
    magnitudes: NDArray[np.float32]

    def only(self, name: str, views: list[int]) -> "Work":
        """These views alone, each with a crop of its own."""
        kept = [self.layout.crop_of_view[t] for t in views]
        layout = ViewLayout(len(views), 0, 0, tuple(range(len(views))))
        crops, flips = self.crops[:, kept].copy(), self.flips[:, kept].copy()
        return Work(name, layout, crops, flips, self.codes[:, views].copy(), self.magnitudes[:, views].copy())


def make_work(samples: int, size: int, seed: int) -> Work:
    """All views of ``samples`` photographs by the default plan."""
    plan = ViewPlan(size=size, seed=seed)
    images = [Image.open(path).convert("RGB") for path in sorted(make_photographs(samples).glob("*/*.jpg"))]
    sizes = np.array([(image.height, image.width) for image in images], np.int32)
    drawn = plan.draw(0, np.arange(samples), sizes)
    crops = np.empty((samples, plan.layout.crops, size, size, 3), np.uint8)
    for image, boxes, into in zip(images, drawn.boxes.tolist(), crops, strict=True):
        for c, (top, left, height, width) in enumerate(boxes):
            box = (left, top, left + width, top + height)
            into[c] = np.asarray(image.resize((size, size), Image.Resampling.BILINEAR, box))
    return Work(f"all {plan.layout.views}", plan.layout, crops, drawn.flips, drawn.codes, drawn.magnitudes)


def run_pillow(work: Work) -> None:
    """Make every view with Pillow and torchvision, and discard it."""
    for b in range(len(work.crops)):
        for t, c in enumerate(work.layout.crop_of_view):
            view = pillow.view(work.crops[b, c], bool(work.flips[b, c]), work.codes[b, t], work.magnitudes[b, t])
            pillow.normalise(view, IMAGENET_MEAN, IMAGENET_STD)


def run_pillow_with_box_blur(work: Work) -> None:
    """``run_pillow`` with Pillow's own blur."""
    exact = pillow.OPERATIONS[Op.GAUSSIAN_BLUR]
    pillow.OPERATIONS[Op.GAUSSIAN_BLUR] = lambda image, sigma: image.filter(ImageFilter.GaussianBlur(sigma))
    try:
        run_pillow(work)
    finally:
        pillow.OPERATIONS[Op.GAUSSIAN_BLUR] = exact


def executor_run(work: Work) -> Callable[[], None]:
    """The executor's side, lowering included. It writes into memory that is already allocated."""
    size, views = work.crops.shape[2], work.layout.views
    executor = CpuExecutor(work.layout, size, IMAGENET_MEAN, IMAGENET_STD)
    out = np.zeros((views, len(work.crops), size, size, 3), np.float32)

    def run() -> None:
        executor(work.crops, work.flips, work.codes, lower(work.codes, work.magnitudes, size), out=out)

    return run


def measure(work: Work, repeats: int) -> dict[str, Any]:
    """Milliseconds a sample of each side, and the ratios."""
    sides: dict[str, Callable[[], None]] = {
        "pillow": partial(run_pillow, work),
        "box_blur": partial(run_pillow_with_box_blur, work),
        "cocor": executor_run(work),
    }
    for run in sides.values():  # once for caches, and for the compiler
        run()
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(repeats):
        for name, run in sides.items():
            started = time.thread_time()
            run()
            times[name].append((time.thread_time() - started) * 1000 / len(work.crops))
    found = {f"{name}_ms": statistics.median(measured) for name, measured in times.items()}
    cocor = found["cocor_ms"]
    return {"views": work.name, **found, "ratio": found["pillow_ms"] / cocor, "box_ratio": found["box_blur_ms"] / cocor}


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line (default: this process's), parsed."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=positive, default=64, help="photographs (default 64)")
    parser.add_argument("--size", type=positive, default=224, help="pixels a side of a crop (default 224)")
    parser.add_argument("--repeats", type=positive, default=5, help="runs of each side (default 5)")
    parser.add_argument("--seed", type=not_negative, default=0, help="of the plan (default 0)")
    parser.add_argument("--json", type=writable, help="write the figures here too")
    return parser.parse_all(argv)


def main() -> None:
    options = arguments()
    torch.set_num_threads(1)
    machine = describe_machine()
    print(machine_line(machine))
    everything = make_work(options.samples, options.size, options.seed)
    parts = [
        everything.only("2 contrastive", [0, 1]),
        everything.only("original", [2]),
        *(everything.only(f"composite of {k}", [2 + k]) for k in (1, 2, 3)),
    ]
    print(f"{options.samples} samples at {options.size} px; CPU time a sample")
    print(header(COLUMNS.values()))
    rows = []
    for work in (*parts, everything):
        rows.append(measure(work, options.repeats))
        print(row(COLUMNS.values(), [rows[-1][key] for key in COLUMNS]), flush=True)
    total = rows[-1]
    rates = {name: everything.layout.views * 1000 / total[f"{name}_ms"] for name in ("pillow", "box_blur", "cocor")}
    print(
        f"views a second and core: Pillow {rates['pillow']:.0f}, with box blur {rates['box_blur']:.0f}, "
        f"cocor {rates['cocor']:.0f} ({1000 / total['cocor_ms']:.0f} samples)"
    )
    if options.json:
        content = {"machine": machine, "samples": options.samples, "size": options.size, "rows": rows}
        write_json(options.json, {**content, "views_per_second_and_core": rates})


if __name__ == "__main__":
    sys.exit(command("executor.py", main))
