"""The CUDA executor makes the same bits as the CPU executor, and both make Pillow's.

``views.cu`` is compiled for the CPU as well (``cuda_on_host.h``), so that its arithmetic and its walk through programs
are tested where there is no GPU; tests marked ``gpu`` run the real kernel.
"""

import ctypes
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from helpers.pictures import GREY_LEVELS, grey_levels_on_cpu
from numpy.typing import NDArray
from PIL import Image

from loaders.channels import IMAGENET_MEAN, IMAGENET_STD
from loaders.errors import UserError
from loaders.kernels import cuda, pillow
from loaders.kernels.cpu import CpuExecutor
from loaders.kernels.lower import lower, normalisation_table
from loaders.views.ops import END, UNIFORM, Op
from loaders.views.plan import ViewLayout, ViewPlan

SIZES = (1, 2, 3, 31, 32, 64, 97, 224, 256)
IDENTITY = np.tile(np.arange(256, dtype=np.uint8), (3, 1))


class Problem(NamedTuple):
    """Arguments of an executor."""

    crops: NDArray[np.uint8]
    flips: NDArray[np.uint8]
    codes: NDArray[np.uint8]
    params: NDArray[np.int32]

    def on_gpu(self) -> list[torch.Tensor]:
        return [torch.from_numpy(array).cuda() for array in self]


def random_images(rng: np.random.Generator, count: int, size: int) -> NDArray[np.uint8]:
    """Noise, flat colours, ramps and ramps of low contrast with noise: (count, size, size, 3)."""
    y, x = np.mgrid[0:size, 0:size]
    images = []
    for i in range(count):
        slopes = rng.uniform(0.2, 3.0, (2, 3))
        ramp = (x[..., None] * slopes[0] + y[..., None] * slopes[1] + rng.uniform(0, 99, 3)) % 256
        noise, colour = rng.integers(0, 256, (size, size, 3)), rng.integers(0, 256, 3)
        soft = np.clip(0.3 * ramp + 60 + rng.normal(0, 3, ramp.shape), 0, 255)
        kinds = (noise, np.broadcast_to(colour, noise.shape), ramp, soft)
        images.append(kinds[i % len(kinds)])
    return np.stack(images).astype(np.uint8)


def random_magnitude(rng: np.random.Generator, op: Op) -> float:
    """Within the useful range, and often at its ends."""
    if op in (Op.BRIGHTNESS, Op.COLOR, Op.CONTRAST, Op.SHARPNESS):
        return float(rng.choice([0.0, 1.0, rng.uniform(0, 1), rng.uniform(0, 2)]))
    if op == Op.SOLARIZE:
        return float(rng.choice([0, 1, 255, 256, rng.integers(0, 257)]))
    if op == Op.POSTERIZE:
        return float(rng.integers(0, 9))
    low, high = {Op.HUE: (-0.5, 0.5), Op.GAUSSIAN_BLUR: (0.1, 4.0)}.get(op, UNIFORM.get(op, (0.0, 0.0))[:2])
    return float(rng.uniform(low, high) * (rng.choice([-1, 1]) if op in UNIFORM else 1))


def random_problem(seed: int, size: int, batch: int, layout: ViewLayout, length: int) -> tuple[Problem, NDArray[Any]]:
    """Programs of up to ``length`` ops of all kinds, and their magnitudes."""
    rng = np.random.default_rng(seed)
    codes = np.full((batch, layout.views, length), END, np.uint8)
    magnitudes = np.zeros(codes.shape, np.float32)
    for program, values in zip(codes.reshape(-1, length), magnitudes.reshape(-1, length), strict=True):
        used = rng.integers(1, length + 1)
        program[:used] = rng.integers(0, len(Op), used)
        values[:used] = [random_magnitude(rng, Op(op)) for op in program[:used]]
    crops = random_images(rng, batch * layout.crops, size).reshape(batch, layout.crops, size, size, 3)
    flips = rng.integers(0, 2, (batch, layout.crops)).astype(np.uint8)
    return Problem(crops, flips, codes, lower(codes, magnitudes, size)), magnitudes


def planned_problem(plan: ViewPlan, batch: int) -> Problem:
    drawn = plan.draw(3, np.arange(batch), np.full((batch, 2), 400, np.int32))
    shape = (batch, plan.layout.crops, plan.size, plan.size, 3)
    crops = random_images(np.random.default_rng(0), batch * plan.layout.crops, plan.size).reshape(shape)
    return Problem(crops, drawn.flips, drawn.codes, lower(drawn.codes, drawn.magnitudes, plan.size))


def plans(size: int) -> list[ViewPlan]:
    """The paper's recipe and that of the released code."""
    return [ViewPlan(size), ViewPlan(size, original="weak", originals=2, magnitudes="released")]


LAYOUT = ViewLayout(contrastive=2, originals=1, composites=5, crop_of_view=(0, 1, 2, 2, 0, 2, 2, 1))


# ------------------------------------------------------------------------------------------- the kernel, on the CPU


@cache
def host_library(folder: Path, configuration: cuda.Configuration, lanes: int, ulps: int) -> ctypes.CDLL:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++")
    library = folder / f"views-{abs(hash((configuration, lanes, ulps)))}.so"
    kernel, shim = Path(cuda.__file__).with_name("views.cu"), Path(__file__).with_name("cuda_on_host.h")
    macros = [f'-DVIEWS_CU="{kernel}"', f"-DLANES={lanes}", f"-DRECIPROCAL_ULPS={ulps}", *configuration.definitions()]
    options = ["-O1", "-std=c++20", "-ffp-contract=off", "-shared", "-fPIC", "-pthread", "-x", "c++"]
    subprocess.run([compiler, *options, *macros, "-o", str(library), str(shim)], check=True)
    return ctypes.CDLL(str(library))


class Host:
    """Runs ``views.cu`` on the CPU with blocks of ``threads`` in warps of ``lanes``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(
        self, problem: Problem, layout: ViewLayout, table: NDArray[Any] = IDENTITY, *,
        threads: int = 1, lanes: int = 1, blocks: int = 1, ulps: int = 0,
    ) -> NDArray[Any]:  # fmt: skip
        batch, count, size = problem.crops.shape[:3]
        aligned = size * size * 3 * table.itemsize % 16 == 0
        configuration = cuda.Configuration(size, table.itemsize, aligned, threads, 1)
        library = host_library(self.folder, configuration, lanes, ulps)
        assert library.job_bytes() == ctypes.sizeof(cuda.Job)
        assert library.scratch_words() == cuda.scratch_words(size)
        order = np.array(cuda.schedule(layout), np.int32)
        out = np.full((layout.views, batch, size, size, 3), 77, table.dtype)  # poison: every value must be written
        scratch = np.full(blocks * cuda.scratch_words(size), 0xDEADBEEF, np.uint32)
        arrays = (*problem, order, np.ascontiguousarray(table), out, scratch, np.zeros(1, np.uint32))
        pointers = [array.ctypes.data for array in arrays]
        job = cuda.Job(*pointers, batch, layout.views, count, problem.codes.shape[2])
        library.run(ctypes.byref(job), blocks)
        return out


@pytest.fixture(scope="session")
def host(tmp_path_factory: pytest.TempPathFactory) -> Host:
    return Host(tmp_path_factory.mktemp("views"))


@pytest.mark.parametrize(("size", "length"), [(1, 10), (2, 10), (13, 3), (32, 20), (97, 6)])
def test_kernel_source_equals_the_cpu_executor(host: Host, size: int, length: int) -> None:
    problem, _ = random_problem(size, size, 6, LAYOUT, length)
    expected = grey_levels_on_cpu(LAYOUT, size, problem)
    np.testing.assert_array_equal(host(problem, LAYOUT), expected)


def test_kernel_source_equals_pillow_op_by_op(host: Host) -> None:
    ops = [op for op in Op if op != Op.GAUSSIAN_BLUR]  # Pillow's blur is another one
    layout = ViewLayout(0, 0, len(ops), tuple([0] * len(ops)))
    problem, magnitudes = random_problem(1, 32, 4, layout, 2)
    problem.codes[...], magnitudes[...] = END, 0
    rng = np.random.default_rng(2)
    for t, op in enumerate(ops):
        problem.codes[:, t, 0] = op
        magnitudes[:, t, 0] = [random_magnitude(rng, op) for _ in range(4)]
    problem = problem._replace(params=lower(problem.codes, magnitudes, 32))
    views = host(problem, layout)
    for t, b in np.ndindex(len(ops), 4):
        expected = pillow.view(problem.crops[b, 0], problem.flips[b, 0], problem.codes[b, t], magnitudes[b, t])
        np.testing.assert_array_equal(views[t, b], np.asarray(expected), err_msg=f"{ops[t]!r} {magnitudes[b, t, 0]}")


@pytest.mark.parametrize("plan", plans(32), ids=["paper", "released"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_kernel_source_normalises_alike(host: Host, plan: ViewPlan, dtype: torch.dtype) -> None:
    problem = planned_problem(plan, 8)
    table = torch.from_numpy(normalisation_table(IMAGENET_MEAN, IMAGENET_STD)).to(dtype)
    bits = torch.int32 if dtype == torch.float32 else torch.int16
    expected = torch.from_numpy(CpuExecutor(plan.layout, 32, IMAGENET_MEAN, IMAGENET_STD)(*problem)).to(dtype)
    np.testing.assert_array_equal(host(problem, plan.layout, table.view(bits).numpy()), expected.view(bits).numpy())


@pytest.mark.parametrize(("threads", "lanes"), [(4, 2), (8, 4)])
def test_threads_that_share_a_view_agree(host: Host, threads: int, lanes: int) -> None:
    problem, _ = random_problem(3, 33, 3, LAYOUT, 5)
    together = host(problem, LAYOUT, threads=threads, lanes=lanes, blocks=2)
    np.testing.assert_array_equal(together, host(problem, LAYOUT))


@pytest.mark.parametrize("ulps", [-2, 0, 2])
def test_hue_survives_approximate_reciprocals(host: Host, ulps: int) -> None:
    green, blue = np.mgrid[0:256, 0:256].astype(np.uint8)
    reds = np.arange(0, 256, 15, dtype=np.uint8)
    crops = np.stack([np.stack([np.full_like(green, red), green, blue], -1) for red in reds])
    codes, flips = np.full((len(reds), 1, 1), Op.HUE, np.uint8), np.zeros((len(reds), 1), np.uint8)
    params = np.zeros((*codes.shape, 8), np.int32)
    params[..., 0] = shift = 77
    views = host(Problem(crops[:, None], flips, codes, params), ViewLayout(1, 0, 0, (0,)), ulps=ulps)[0]
    for crop, view in zip(crops, views, strict=True):
        hsv = np.array(Image.fromarray(crop).convert("HSV"))
        hsv[..., 0] += shift
        turned = Image.frombytes("HSV", (256, 256), hsv.tobytes()).convert("RGB")
        np.testing.assert_array_equal(view, np.asarray(turned))


# -------------------------------------------------------------------------------------------------------- the host side


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
def test_nvrtc_compiles_the_kernel(architecture: str) -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    assert cuda.compile_kernel(cuda.configure(224, 2, True), architecture).startswith(b"\x7fELF")


def test_long_programs_are_started_first() -> None:
    assert [t for t, _ in cuda.schedule(ViewPlan().layout)] == [0, 1, 5, 4, 3, 2]


def test_other_output_types_are_refused() -> None:
    with pytest.raises(UserError, match="float64"):
        cuda.CudaExecutor(LAYOUT, 32, IMAGENET_MEAN, IMAGENET_STD, torch.float64, "cuda:0")


# ------------------------------------------------------------------------------------------------ the kernel, on a GPU


def executor(layout: ViewLayout, size: int, dtype: torch.dtype = torch.bfloat16) -> cuda.CudaExecutor:
    return cuda.CudaExecutor(layout, size, IMAGENET_MEAN, IMAGENET_STD, dtype)


def assert_gpu_equals_cpu(problem: Problem, layout: ViewLayout, size: int) -> None:
    views = torch.full((layout.views, len(problem.crops), size, size, 3), -1.0, device="cuda")
    cuda.CudaExecutor(layout, size, *GREY_LEVELS, torch.float32)(*problem.on_gpu(), out=views)
    np.testing.assert_array_equal(views.round().byte().cpu().numpy(), grey_levels_on_cpu(layout, size, problem))


@pytest.mark.gpu
@pytest.mark.parametrize("size", SIZES)
def test_gpu_equals_cpu_on_random_programs(size: int) -> None:
    for length, batch in ((1, 64), (3, 64), (10, 40)) if size < 200 else ((1, 16), (3, 16), (10, 40)):
        assert_gpu_equals_cpu(random_problem(size + length, size, batch, LAYOUT, length)[0], LAYOUT, size)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [32, 224])
def test_gpu_equals_cpu_on_planned_programs(size: int) -> None:
    for plan in plans(size):
        assert_gpu_equals_cpu(planned_problem(plan, 64), plan.layout, size)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("size", [97, 224])
def test_gpu_normalises_like_the_cpu_executor(size: int, dtype: torch.dtype) -> None:
    problem, _ = random_problem(5, size, 8, LAYOUT, 3)
    expected = torch.from_numpy(CpuExecutor(LAYOUT, size, IMAGENET_MEAN, IMAGENET_STD)(*problem)).to(dtype)
    memory = torch.full((LAYOUT.views * 8 * size * size * 3 + 1,), torch.nan, dtype=dtype, device="cuda")
    for start in (0, 1):  # aligned to 16 bytes or not
        out = memory[start:][: expected.numel()].view(expected.shape)
        assert executor(LAYOUT, size, dtype)(*problem.on_gpu(), out=out) is out
        assert torch.equal(out.cpu(), expected)


@pytest.mark.gpu
def test_gpu_graphs_and_streams_give_the_views() -> None:
    run = executor(LAYOUT, 64)
    problems = [random_problem(seed, 64, 16, LAYOUT, 4)[0] for seed in (1, 2)]
    expected = [run(*problem.on_gpu()).clone() for problem in problems]
    inputs = problems[0].on_gpu()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        assert torch.equal(run(*inputs), expected[0])
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        views = run(*inputs)
    for _ in range(3):
        for problem, wanted in zip(problems, expected, strict=True):
            for tensor, array in zip(inputs, problem, strict=True):
                tensor.copy_(torch.from_numpy(array))
            views.zero_()
            graph.replay()
            assert torch.equal(views, wanted)
