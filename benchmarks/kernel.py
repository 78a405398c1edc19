"""Time the views: by the CUDA kernel, or by the CPU executor against Pillow.

    python benchmarks/kernel.py                      # 64 and 256 samples of 6 views at 224 pixels, bfloat16
    python benchmarks/kernel.py --per-op --json out.json
    python benchmarks/kernel.py --cpu                # one core; the default without a GPU

GPU times are medians over runs on inputs in turn, which together do not fit in the cache: ``single`` of launches
between CUDA events, ``graph`` of replayed CUDA graphs, without gaps. ``host`` is the host's mean time for a launch. MB
must be moved at least, every crop read and every view written once; ``copy`` is this GPU's rate for a plain copy.

On the CPU the baseline is what a training script would do: Pillow for the basic augmentations, torchvision's transforms
on PIL images for jitter, grey and blur, ToTensor and Normalize; ``box blur`` takes Pillow's approximation of the
Gaussian blur. Neither side decodes or crops. A figure is the median CPU time of one thread, the sides in turn.
"""

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageFilter
from torch import Tensor

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])

from benchmarks.common import Column, describe_machine, header, machine_line, row, script, write_json
from benchmarks.images import make_photographs
from loaders.arguments import Parser, positive, writable
from loaders.channels import IMAGENET_MEAN, IMAGENET_STD
from loaders.kernels import cuda, pillow
from loaders.kernels.cpu import CpuExecutor
from loaders.kernels.cuda import CudaExecutor
from loaders.kernels.lower import lower
from loaders.views.ops import END, UNIFORM, Op
from loaders.views.plan import ViewLayout, ViewPlan

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
INPUT_SETS = 4
GRAPH_RUNS = 8
_SIDES = ("pillow", "box_blur", "cocor")
COLUMNS = {  # by the keys of ``time_case``
    "case": Column("case", -19), "views": Column("views", 6), "megabytes": Column("MB", 6, ".0f"),
    "single_ms": Column("single ms", 10, ".3f"), "graph_ms": Column("graph ms", 9, ".3f"),
    "graph_ms_worst": Column("worst", 7, ".3f"), "gigabytes_per_second": Column("GB/s", 6, ".0f"),
    "host_us": Column("host us", 8, ".1f"),
}  # fmt: skip
CPU_COLUMNS = {  # by the keys of ``measure``
    "views": Column("views", -6), "pillow_ms": Column("Pillow ms", 11, ".3f"),
    "box_blur_ms": Column("box blur ms", 12, ".3f"), "cocor_ms": Column("cocor ms", 10, ".3f"),
    "ratio": Column("ratio", 7, ".1f"), "box_ratio": Column("box ratio", 10, ".1f"),
}  # fmt: skip
TYPICAL = {Op.HUE: 0.08, Op.GAUSSIAN_BLUR: 1.05, Op.BRIGHTNESS: 0.8, Op.COLOR: 0.8, Op.CONTRAST: 0.8, Op.SHARPNESS: 0.5}

Inputs = tuple[Tensor, Tensor, Tensor, Tensor]  # of an executor: crops, flips, codes, parameters, on the GPU


@dataclass
class Case:
    """Batch of programs to time, with several sets of inputs."""

    name: str
    layout: ViewLayout
    inputs: list[Inputs]


def smooth_crops(batch: int, crops: int, size: int, seed: int) -> Tensor:
    """Draw images with about the spectrum of photographs: uint8 (B, C, S, S, 3)."""
    generator = torch.Generator("cuda").manual_seed(seed)
    images = torch.zeros(batch * crops, 3, size, size, device="cuda")
    side = 2
    while side < 2 * size:
        noise = torch.randn(batch * crops, 3, min(side, size), min(side, size), device="cuda", generator=generator)
        images += torch.nn.functional.interpolate(noise, (size, size), mode="bilinear") / side**0.7
        side *= 2
    images = (images * 60 + 120).clamp_(0, 255).to(torch.uint8)
    return images.permute(0, 2, 3, 1).reshape(batch, crops, size, size, 3).contiguous()


def make_case(name: str, layout: ViewLayout, size: int, programs: Sequence[tuple[np.ndarray, np.ndarray]]) -> Case:
    """Make sets of inputs for ``programs``, codes and magnitudes (B, V, N) each."""
    case, rng = Case(name, layout, []), np.random.default_rng(0)
    for i, (codes, magnitudes) in enumerate(programs):
        crops = smooth_crops(len(codes), layout.crops, size, i)
        arrays = rng.integers(0, 2, crops.shape[:2]).astype(np.uint8), codes, lower(codes, magnitudes, size)
        flips, operations, params = (torch.from_numpy(np.ascontiguousarray(array)).cuda() for array in arrays)
        case.inputs.append((crops, flips, operations, params))
    return case


def planned_case(plan: ViewPlan, batch: int, view: int | None = None) -> Case:
    """Make a case of the plan's programs, or of those of one view."""
    sizes, views = np.full((batch, 2), (375, 500), np.int32), slice(None) if view is None else slice(view, view + 1)
    drawn = [plan.draw(i, np.arange(batch), sizes) for i in range(INPUT_SETS)]
    programs = [(one.codes[:, views], one.magnitudes[:, views]) for one in drawn]
    layout, name = (plan.layout, "all views") if view is None else (ViewLayout(0, 0, 1, (0,)), f"view {view}")
    return make_case(name, layout, plan.size, programs)


def op_case(op: Op | None, batch: int, size: int) -> Case:
    """Make a case of the same operation for 6 views of every sample."""
    layout = ViewPlan(size).layout
    codes = np.full((batch, layout.views, 1), END if op is None else op, np.uint8)
    low, high = (0.0, 0.0) if op is None else UNIFORM.get(op, (0.0, 0.0))[:2]
    drawn = np.random.default_rng(0).uniform(low, high, codes.shape)
    magnitudes = np.full(codes.shape, TYPICAL[op]) if op in TYPICAL else drawn
    programs = [(codes, magnitudes.astype(np.float32))] * INPUT_SETS
    return make_case("nothing" if op is None else op.label, layout, size, programs)


def event_times(run: Callable[[int], Any], repeats: int) -> list[float]:
    """Time ``run(i)`` on the GPU in milliseconds, one by one."""
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for i, (start, end) in enumerate(events):
        start.record()
        run(i)
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in events]


def time_case(case: Case, executor: CudaExecutor, repeats: int) -> dict[str, Any]:
    """Measure median milliseconds of launches and replays, and GB/s."""
    out = executor(*case.inputs[0])

    def run(i: int) -> Any:
        return executor(*case.inputs[i % INPUT_SETS], out)

    for i in range(5):
        run(i)
    torch.cuda.synchronize()
    single = event_times(run, repeats)
    started = time.perf_counter()
    for i in range(20):
        run(i)
    host = (time.perf_counter() - started) / 20
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(GRAPH_RUNS):
            run(i)
    graph.replay()
    replayed = [ms / GRAPH_RUNS for ms in event_times(lambda _: graph.replay(), max(5, repeats // GRAPH_RUNS))]
    crops, ms = case.inputs[0][0], statistics.median(replayed)
    moved = crops.numel() + out.numel() * out.element_size()
    return {
        "case": case.name, "views": case.layout.views * len(crops), "megabytes": moved / 1e6,
        "single_ms": statistics.median(single), "graph_ms": ms, "graph_ms_worst": max(replayed),
        "gigabytes_per_second": moved / ms / 1e6, "host_us": host * 1e6,
    }  # fmt: skip


def copy_rate() -> float:
    """Measure GB/s of a device-to-device copy, counting reads and writes."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    times = event_times(lambda _: target.copy_(source), 20)
    return 2 * source.numel() / statistics.median(times[5:]) / 1e6


def cases(options: argparse.Namespace) -> list[Case]:
    plan = ViewPlan(options.size)
    found = [planned_case(plan, batch) for batch in options.batches]
    if options.per_op:
        largest = max(options.batches)
        found += [planned_case(plan, largest, t) for t in range(plan.layout.views)]
        found += [op_case(op, largest, options.size) for op in (None, *Op)]
    return found


@dataclass(frozen=True)
class Work:
    """Inputs of both sides. Pillow takes magnitudes, the executor lowers them first."""

    layout: ViewLayout
    crops: NDArray[np.uint8]
    flips: NDArray[np.uint8]
    codes: NDArray[np.uint8]
    magnitudes: NDArray[np.float32]


def make_work(samples: int, size: int, seed: int) -> Work:
    """Prepare all views of ``samples`` photographs by the default plan."""
    plan = ViewPlan(size=size, seed=seed)
    images = [Image.open(path).convert("RGB") for path in sorted(make_photographs(samples).glob("*/*.jpg"))]
    sizes = np.array([(image.height, image.width) for image in images], np.int32)
    drawn = plan.draw(0, np.arange(samples), sizes)
    crops = np.empty((samples, plan.layout.crops, size, size, 3), np.uint8)
    for image, boxes, into in zip(images, drawn.boxes.tolist(), crops, strict=True):
        for c, (top, left, height, width) in enumerate(boxes):
            box = (left, top, left + width, top + height)
            into[c] = np.asarray(image.resize((size, size), Image.Resampling.BILINEAR, box))
    return Work(plan.layout, crops, drawn.flips, drawn.codes, drawn.magnitudes)


def run_pillow(work: Work, box_blur: bool) -> None:
    """Make every view with Pillow and torchvision, and discard it."""
    exact = pillow.OPERATIONS[Op.GAUSSIAN_BLUR]
    if box_blur:
        pillow.OPERATIONS[Op.GAUSSIAN_BLUR] = lambda image, sigma: image.filter(ImageFilter.GaussianBlur(sigma))
    try:
        for b, (t, c) in itertools.product(range(len(work.crops)), enumerate(work.layout.crop_of_view)):
            view = pillow.view(work.crops[b, c], bool(work.flips[b, c]), work.codes[b, t], work.magnitudes[b, t])
            pillow.normalise(view, IMAGENET_MEAN, IMAGENET_STD)
    finally:
        pillow.OPERATIONS[Op.GAUSSIAN_BLUR] = exact


def executor_run(work: Work) -> Callable[[], None]:
    """Prepare the executor's side, lowering included, to write into one array."""
    size, views = work.crops.shape[2], work.layout.views
    executor = CpuExecutor(work.layout, size, IMAGENET_MEAN, IMAGENET_STD)
    out = np.zeros((views, len(work.crops), size, size, 3), np.float32)

    def run() -> None:
        executor(work.crops, work.flips, work.codes, lower(work.codes, work.magnitudes, size), out=out)

    return run


def measure(work: Work, repeats: int) -> dict[str, Any]:
    """Time each side: milliseconds a sample, and the ratios."""
    sides: dict[str, Callable[[], None]] = {
        "pillow": partial(run_pillow, work, False), "box_blur": partial(run_pillow, work, True),
        "cocor": executor_run(work),
    }  # fmt: skip
    for run in sides.values():  # once for caches, and for the compiler
        run()
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(repeats):
        for name, run in sides.items():
            started = time.thread_time()
            run()
            times[name].append((time.thread_time() - started) * 1000 / len(work.crops))
    found = {f"{name}_ms": statistics.median(measured) for name, measured in times.items()}
    ratios = {"ratio": found["pillow_ms"] / found["cocor_ms"], "box_ratio": found["box_blur_ms"] / found["cocor_ms"]}
    return {"views": work.layout.views, **found, **ratios}


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line (default: this process's)."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--cpu", action="store_true", help="the CPU executor against Pillow")
    add("--samples", type=positive, default=64, help="photographs, on the CPU (default 64)")
    add("--batches", type=lambda text: [positive(n) for n in text.split(",")], default=[64, 256])
    add("--size", type=positive, default=224)
    add("--dtype", choices=DTYPES, default="bfloat16")
    add("--repeats", type=positive, default=100)
    add("--per-op", action="store_true", help="also each view and each operation alone")
    add("--json", type=writable)
    return parser.parse_all(argv)


def main() -> None:
    options, machine = arguments(), describe_machine()
    print(machine_line(machine))
    rows: list[dict[str, Any]] = []
    if options.cpu or not torch.cuda.is_available():
        torch.set_num_threads(1)
        rows = [measure(make_work(options.samples, options.size, seed=0), max(1, options.repeats // 20))]
        print(f"{options.samples} samples, {options.size} px; CPU time a sample\n{header(CPU_COLUMNS.values())}")
        print(row(CPU_COLUMNS.values(), [rows[0][key] for key in CPU_COLUMNS]))
        rates = [f"{name} {1000 * rows[0]['views'] / rows[0][f'{name}_ms']:.0f}" for name in _SIDES]
        print(f"views a second and core: {', '.join(rates)} ({1000 / rows[0]['cocor_ms']:.0f} samples)")
    else:
        dtype = DTYPES[options.dtype]
        kernel = cuda.load_kernel(0, cuda.configure(options.size, dtype.itemsize, True))
        print(f"{options.size} px, {options.dtype}, copy {copy_rate():.0f} GB/s")
        print(f"{kernel.resources()}, {kernel.resident_blocks} blocks resident", header(COLUMNS.values()), sep="\n")
        for case in cases(options):
            executor = CudaExecutor(case.layout, options.size, IMAGENET_MEAN, IMAGENET_STD, dtype)
            rows.append(time_case(case, executor, options.repeats))
            print(row(COLUMNS.values(), [rows[-1][key] for key in COLUMNS]), flush=True)
    if options.json:
        settings = {"size": options.size, "dtype": options.dtype, "cpu": options.cpu}
        write_json(options.json, {"benchmark": "kernel", "machine": machine, "settings": settings, "rows": rows})


if __name__ == "__main__":
    script("kernel.py", main)
