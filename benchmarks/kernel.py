"""Time the CUDA executor: all views of a batch in one launch, and what each operation costs.

    python benchmarks/kernel.py                      # 64 and 256 samples of 6 views at 224 pixels, bfloat16
    python benchmarks/kernel.py --per-op --json out.json
    python benchmarks/kernel.py --variants 512x1024,256x1024,384x1152

GPU times are medians over many runs on sets of inputs in turn, which together do not fit in the cache: ``single`` of
launches between CUDA events, ``graph`` of replayed CUDA graphs, without gaps between launches. ``host`` is the host's
mean time for a launch. MB are those that must be moved at least, every crop read once and every view written once;
``copy`` is this GPU's rate for a plain copy. A variant is threads a block x threads resident on a multiprocessor (the
more, the fewer registers each has), and perhaps +MACRO.
"""

import argparse
import re
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from cocor.cli import command
from common import Column, describe_machine, header, machine_line, row, write_json
from loaders.arguments import Parser, positive, writable
from loaders.batch import IMAGENET_MEAN, IMAGENET_STD
from loaders.errors import UserError
from loaders.kernels import cuda
from loaders.kernels.cpu import CpuExecutor
from loaders.kernels.cuda import CudaExecutor
from loaders.kernels.lower import lower
from loaders.views.ops import END, UNIFORM, Op
from loaders.views.plan import ViewLayout, ViewPlan

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
INPUT_SETS = 4
GRAPH_RUNS = 8
COLUMNS = {  # by the keys of ``time_case``
    "case": Column("case", -19),
    "views": Column("views", 6),
    "megabytes": Column("MB", 6, ".0f"),
    "single_ms": Column("single ms", 10, ".3f"),
    "graph_ms": Column("graph ms", 9, ".3f"),
    "graph_ms_worst": Column("worst", 7, ".3f"),
    "gigabytes_per_second": Column("GB/s", 6, ".0f"),
    "host_us": Column("host us", 8, ".1f"),
}
TYPICAL = {Op.HUE: 0.08, Op.GAUSSIAN_BLUR: 1.05, Op.BRIGHTNESS: 0.8, Op.COLOR: 0.8, Op.CONTRAST: 0.8, Op.SHARPNESS: 0.5}


class Inputs(NamedTuple):
    """What an executor takes, on the GPU."""

    crops: Tensor
    flips: Tensor
    codes: Tensor
    params: Tensor


@dataclass
class Case:
    """A batch of programs to time, with several sets of inputs."""

    name: str
    layout: ViewLayout
    inputs: list[Inputs] = field(default_factory=list)

    @property
    def views(self) -> int:
        return self.layout.views * len(self.inputs[0].crops)

    def bytes(self, out_bytes: int) -> int:
        crops = self.inputs[0].crops
        view = crops[0, 0].numel()
        return crops.numel() + self.views * view * out_bytes


def smooth_crops(batch: int, crops: int, size: int, seed: int) -> Tensor:
    """Random images with roughly the spectrum of photographs, sums of octaves of noise: uint8 (B, C, S, S, 3) on the
    GPU."""
    generator = torch.Generator("cuda").manual_seed(seed)
    images = torch.zeros(batch * crops, 3, size, size, device="cuda")
    cells = 2
    while cells < 2 * size:
        noise = torch.randn(batch * crops, 3, min(cells, size), min(cells, size), device="cuda", generator=generator)
        images += torch.nn.functional.interpolate(noise, (size, size), mode="bilinear") / cells**0.7
        cells *= 2
    images = (images * 60 + 120).clamp_(0, 255).to(torch.uint8)
    return images.permute(0, 2, 3, 1).reshape(batch, crops, size, size, 3).contiguous()


def to_gpu(array: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).cuda()


def planned_case(plan: ViewPlan, batch: int, views: list[int] | None = None) -> Case:
    """The plan's programs, or those of some of its views only."""
    layout, name = plan.layout, "all views"
    if views is not None:
        used = [plan.layout.crop_of_view[t] for t in views]
        layout = ViewLayout(0, 0, len(views), tuple(used.index(crop) for crop in used))
        name = f"view {','.join(map(str, views))}"
    case = Case(name, layout)
    for i in range(INPUT_SETS):
        drawn = plan.draw(i, np.arange(batch), np.full((batch, 2), (375, 500), np.int32))
        codes, magnitudes = drawn.codes[:, views or slice(None)], drawn.magnitudes[:, views or slice(None)]
        crops, flips = smooth_crops(batch, layout.crops, plan.size, i), drawn.flips[:, : layout.crops]
        params = lower(codes, magnitudes, plan.size)
        case.inputs.append(Inputs(crops, to_gpu(flips), to_gpu(codes), to_gpu(params)))
    return case


def op_case(ops: list[Op], batch: int, size: int) -> Case:
    """The same program for 6 views of every sample."""
    case = Case(" + ".join(op.label for op in ops) or "nothing", ViewPlan(size).layout)
    rng = np.random.default_rng(0)
    codes = np.full((batch, case.layout.views, max(1, len(ops))), END, np.uint8)
    magnitudes = np.zeros(codes.shape, np.float32)
    for i, op in enumerate(ops):
        codes[..., i] = op
        low, high = UNIFORM.get(op, (0.0, 0.0))[:2]
        magnitudes[..., i] = TYPICAL.get(op, rng.uniform(low, high, codes.shape[:2]))
    params = lower(codes, magnitudes, size)
    for i in range(INPUT_SETS):
        crops = smooth_crops(batch, case.layout.crops, size, i)
        flips = rng.integers(0, 2, crops.shape[:2]).astype(np.uint8)
        case.inputs.append(Inputs(crops, to_gpu(flips), to_gpu(codes), to_gpu(params)))
    return case


def event_times(run: Callable[[int], Any], repeats: int) -> list[float]:
    """Milliseconds of ``run(i)`` on the GPU, one by one."""
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for i, (start, end) in enumerate(events):
        start.record()
        run(i)
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in events]


def time_case(case: Case, executor: CudaExecutor, repeats: int) -> dict[str, Any]:
    """Median milliseconds of single launches and of graph replays, microseconds of the host, GB/s."""
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
    moved, ms = case.bytes(out.element_size()), statistics.median(replayed)
    return {
        "case": case.name,
        "views": case.views,
        "megabytes": moved / 1e6,
        "single_ms": statistics.median(single),
        "graph_ms": ms,
        "graph_ms_worst": max(replayed),
        "gigabytes_per_second": moved / ms / 1e6,
        "host_us": host * 1e6,
    }


def copy_rate() -> float:
    """GB/s of a device-to-device copy, counting reads and writes."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    times = event_times(lambda _: target.copy_(source), 20)
    return 2 * source.numel() / statistics.median(times[5:]) / 1e6


def verify(size: int) -> None:
    """The executor that is timed must make the same bits as the CPU's."""
    case = planned_case(ViewPlan(size), 8)
    views = CudaExecutor(case.layout, size, IMAGENET_MEAN, IMAGENET_STD).execute_uint8(*case.inputs[0])
    on_cpu = CpuExecutor(case.layout, size, IMAGENET_MEAN, IMAGENET_STD)
    expected = on_cpu.execute_uint8(*(tensor.cpu().numpy() for tensor in case.inputs[0]))
    if not np.array_equal(views.cpu().numpy(), expected):
        raise SystemExit("benchmarks/kernel.py: the GPU's views differ from the CPU's")


class Variant(cuda.Configuration):
    """A configuration that defines further ``macros`` of ``views.cu``."""

    macros: tuple[str, ...] = ()

    def definitions(self) -> list[str]:
        return [*super().definitions(), *(f"-D{name}=1" for name in self.macros)]


def variants(text: str) -> list[str]:
    """For argparse: names for :func:`select`."""
    names = text.split(",")
    wrong = [name for name in names if not re.fullmatch(r"[1-9]\d*x[1-9]\d*(\+\w+)*", name)]
    if wrong:
        raise argparse.ArgumentTypeError(f"{wrong[0]} is not THREADSxRESIDENT, such as 512x1024")
    return names


def select(variant: str) -> None:
    """From now on compile the kernel as ``variant`` says: ``512x1024`` or ``512x1024+MACRO``."""
    threads, *macros = variant.split("+")
    cuda.BLOCK_THREADS, cuda.RESIDENT_THREADS = (int(number) for number in threads.split("x"))
    Variant.macros = tuple(macros)
    cuda.Configuration = Variant  # type: ignore[misc]
    cuda.load_kernel.cache_clear()


def cases(options: argparse.Namespace) -> list[Case]:
    plan = ViewPlan(options.size)
    found = [planned_case(plan, batch) for batch in options.batches]
    if options.per_op:
        largest = max(options.batches)
        found += [planned_case(plan, largest, [t]) for t in range(plan.layout.views)]
        found += [op_case(ops, largest, options.size) for ops in ([], *([op] for op in Op))]
    return found


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line (default: this process's), parsed."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=lambda text: [positive(n) for n in text.split(",")], default=[64, 256])
    parser.add_argument("--size", type=positive, default=224)
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--repeats", type=positive, default=100)
    parser.add_argument("--per-op", action="store_true", help="also each view and each operation alone")
    parser.add_argument(
        "--variants", type=variants, default=[], help="such as 512x1024,256x1024; the first is also used for --per-op"
    )
    parser.add_argument("--once", action="store_true", help="launch every case once, for a profiler")
    parser.add_argument("--json", type=writable)
    return parser.parse_all(argv)


def main() -> None:
    options = arguments()
    if not torch.cuda.is_available():
        raise UserError("there is no GPU here; benchmarks/executor.py measures the CPU's executor")
    default = f"{cuda.BLOCK_THREADS}x{cuda.RESIDENT_THREADS}"
    rows: list[dict[str, Any]] = []
    prepared = cases(options)
    machine = describe_machine()
    print(machine_line(machine), f"{options.size} px, {options.dtype}", sep="\n")
    if not options.once:
        print(f"copy {copy_rate():.0f} GB/s")
    for variant in options.variants or [default]:
        select(variant)
        verify(options.size)
        kernel = cuda.load_kernel(0, cuda.configure(options.size, DTYPES[options.dtype].itemsize, True))
        print(f"\n{variant}: {kernel.resources()}, {kernel.resident_blocks} blocks resident")
        print(header(COLUMNS.values()))
        for case in prepared if not rows else prepared[: len(options.batches)]:
            executor = CudaExecutor(case.layout, options.size, IMAGENET_MEAN, IMAGENET_STD, DTYPES[options.dtype])
            if options.once:
                executor(*case.inputs[0])
                continue
            rows.append({"variant": variant, **time_case(case, executor, options.repeats)})
            print(row(COLUMNS.values(), [rows[-1][key] for key in COLUMNS]), flush=True)
    torch.cuda.synchronize()
    if options.json:
        settings = {"size": options.size, "dtype": options.dtype}
        write_json(options.json, {"benchmark": "kernel", "machine": machine, "settings": settings, "rows": rows})


if __name__ == "__main__":
    sys.exit(command("kernel.py", main))
