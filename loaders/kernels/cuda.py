"""CUDA executor: view programs in one kernel launch on torch's current stream.

``views.cu`` holds the kernel and explains it. NVRTC compiles it on first use, for one image size and output type at a
time, through NVIDIA's ``cuda.bindings`` package, which PyTorch's CUDA builds bring along. Other routes fail: Triton
cannot express gathers between the operations of one launch, each image its own; numba-cuda breaks with current NumPy
and refuses the shared memory; nvcc or torch's cpp_extension would ask every user for a compiler.

A call never waits for the GPU and can be captured in a CUDA graph (call once before, to compile the kernel). Scratch
from torch's allocator, 12 * S * S bytes for each resident block (159 MB at 224 pixels on an H100), at most 512 MiB,
is given back at the end of the call.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

import numpy as np
import torch

from loaders.errors import UserError
from loaders.kernels.lower import normalisation_table
from loaders.views.ops import END, Op
from loaders.views.plan import ViewLayout

SCRATCH_LIMIT = 512 << 20
BLOCK_THREADS, RESIDENT_THREADS = 512, 1024  # at most, of a block; of all blocks on a multiprocessor
OLDEST = (8, 0)  # compute capability: the kernel reduces within a warp by instructions of Ampere and newer
_WORD = 4


@dataclass(frozen=True)
class Configuration:
    """Configuration that a module is compiled for."""

    size: int
    out_bytes: int
    aligned: bool  # every view starts at a multiple of 16 bytes, every crop at one of 4
    threads: int  # a block
    blocks: int  # resident on a multiprocessor

    def definitions(self) -> list[str]:
        """Return compiler options: the macros that ``views.cu`` asks for."""
        macros = {
            "SIZE": self.size,
            "OUT_BYTES": self.out_bytes,
            "ALIGNED": int(self.aligned),
            "THREADS": self.threads,
            "BLOCKS": self.blocks,
            "END": END,
            **{f"OP_{op.name}": int(op) for op in Op},
        }
        return [f"-D{name}={value}" for name, value in macros.items()]


def configure(size: int, out_bytes: int, aligned: bool) -> Configuration:
    """Choose a configuration; images too small for a whole block get smaller ones."""
    tiles = -(-size * size * out_bytes // 512)  # of a warp
    threads = min(BLOCK_THREADS, max(64, 32 * tiles))
    aligned = aligned and size * size * 3 * out_bytes % 16 == 0
    return Configuration(size, out_bytes, aligned, threads, max(1, RESIDENT_THREADS // threads))


class Job(ctypes.Structure):
    """Arguments of a launch: ``struct Job`` of ``views.cu``."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("crops", "flips", "codes", "params", "schedule")),
        *((name, ctypes.c_void_p) for name in ("normalisation", "out", "scratch", "queue")),
        *((name, ctypes.c_int) for name in ("batch", "views", "crops_a_sample", "length")),
    )


def scratch_words(size: int) -> int:
    """Return uint32 words of scratch for a block: three images of even length."""
    return 3 * ((size * size + 1) // 2 * 2)


class CudaExecutor:
    """CUDA executor; ``mean`` and ``std`` are per channel, of values in [0, 1]."""

    def __init__(
        self,
        layout: ViewLayout,
        size: int,
        mean: Sequence[float],
        std: Sequence[float],
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cuda",
    ) -> None:
        if dtype not in (torch.bfloat16, torch.float16, torch.float32):
            raise UserError(f"the GPU makes views in bfloat16, float16 or float32, not {dtype}")
        device = torch.device(device)
        self.device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        self.size, self.crops, self.views = size, layout.crops, layout.views
        self._normalise = torch.from_numpy(normalisation_table(mean, std)).to(dtype).to(self.device)
        self._schedule = torch.tensor(schedule(layout), dtype=torch.int32, device=self.device)

    def __call__(
        self,
        crops: torch.Tensor,
        flips: torch.Tensor,
        codes: torch.Tensor,
        params: torch.Tensor,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Make normalised views (T, B, S, S, 3) in the executor's dtype.

        Permuted to (T, B, 3, S, S) they are channels-last images. Inputs, as of :class:`loaders.kernels.Executor`, and
        ``out`` are contiguous, on the executor's device and ready on its current stream.
        """
        batch, length, size, table = len(crops), codes.shape[-1], self.size, self._normalise
        with torch.cuda.device(self.device):
            if out is None:
                out = torch.empty((self.views, batch, size, size, 3), dtype=table.dtype, device=self.device)
            _check("crops", crops, torch.uint8, (batch, self.crops, size, size, 3), self.device)
            _check("flips", flips, torch.uint8, (batch, self.crops), self.device)
            _check("codes", codes, torch.uint8, (batch, self.views, length), self.device)
            _check("params", params, torch.int32, (batch, self.views, length, 8), self.device)
            _check("out", out, table.dtype, (self.views, batch, size, size, 3), self.device)
            if batch == 0:
                return out
            aligned = out.data_ptr() % 16 == 0 and crops.data_ptr() % 4 == 0
            kernel = load_kernel(self.device.index, configure(size, table.element_size(), aligned))
            blocks = min(batch * self.views, kernel.resident_blocks, SCRATCH_LIMIT // (scratch_words(size) * _WORD))
            blocks = max(1, blocks)
            scratch = torch.empty(blocks * scratch_words(size) + 4, dtype=torch.int32, device=self.device)
            queue = scratch.data_ptr() + blocks * scratch_words(size) * _WORD
            tensors = (crops, flips, codes, params, self._schedule, table, out, scratch)
            job = Job(*(t.data_ptr() for t in tensors), queue, batch, self.views, self.crops, length)
            kernel.launch(blocks, job, torch.cuda.current_stream(self.device).cuda_stream)
        return out

    def close(self) -> None:
        """Do nothing: compiled modules stay with the process."""


def schedule(layout: ViewLayout) -> list[tuple[int, int]]:
    """Order (view, its crop) by work: long ones first, so that no block ends alone."""
    first_composite = layout.contrastive + layout.originals
    order = [
        *range(layout.contrastive),
        *reversed(range(first_composite, layout.views)),  # from the longest programs to the shortest
        *range(layout.contrastive, first_composite),
    ]
    return [(t, layout.crop_of_view[t]) for t in order]


def _check(name: str, tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device) -> None:
    """Check shapes, as the kernel checks no bounds."""
    if tensor.shape != shape or tensor.dtype != dtype or tensor.device != device or not tensor.is_contiguous():
        raise ValueError(
            f"{name} is {tuple(tensor.shape)} {tensor.dtype} on {tensor.device} with strides {tensor.stride()}; "
            f"expected contiguous {shape} {dtype} on {device}"
        )


def sources() -> dict[str, bytes]:
    """Read ``views.cu`` and the files that it includes, by name."""
    files = [file for file in resources.files("loaders.kernels").iterdir() if file.name.endswith(".cu")]
    return {file.name: file.read_bytes() for file in files}


def compile_kernel(configuration: Configuration, architecture: str) -> bytes:
    """Compile ``views.cu`` to a cubin for ``sm_90`` or the like, without a GPU."""
    nvrtc = _bindings("nvrtc")
    files = sources()
    main = files.pop("views.cu")
    names = [name.encode() for name in files]
    program = _checked(nvrtc.nvrtcCreateProgram(main, b"views.cu", len(files), list(files.values()), names))
    # no contraction of a product and a sum into one rounding: Pillow rounds both
    options = ["-std=c++17", "-fmad=false", f"-arch={architecture}", *configuration.definitions()]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
    if int(status) != 0:
        log = b" " * _checked(nvrtc.nvrtcGetProgramLogSize(program))
        nvrtc.nvrtcGetProgramLog(program, log)
        raise RuntimeError(f"NVRTC cannot compile views.cu for {architecture} ({configuration}):\n{log.decode()}")
    code = b" " * _checked(nvrtc.nvrtcGetCUBINSize(program))
    _checked(nvrtc.nvrtcGetCUBIN(program, code))
    nvrtc.nvrtcDestroyProgram(program)
    return code


class Kernel:
    """``make_views`` of one compiled module, on one device, which is current."""

    def __init__(self, device: int, configuration: Configuration) -> None:
        driver = _bindings("driver")
        properties = torch.cuda.get_device_properties(device)
        if (properties.major, properties.minor) < OLDEST:
            raise UserError(f"the CUDA executor needs compute capability 8.0 or newer, {properties.name} has less")
        torch.zeros(1, device=device)  # makes torch create the device's primary context, which the module goes into
        self._context = _checked(driver.cuDevicePrimaryCtxRetain(_checked(driver.cuDeviceGet(device))))
        _checked(driver.cuCtxSetCurrent(self._context))
        code = compile_kernel(configuration, f"sm_{properties.major}{properties.minor}")
        self._module = _checked(driver.cuModuleLoadData(np.frombuffer(code, np.uint8).ctypes.data))
        self._function = _checked(driver.cuModuleGetFunction(self._module, b"make_views"))
        self._threads = configuration.threads
        occupancy = driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(self._function, self._threads, 0)
        self.resident_blocks = _checked(occupancy) * properties.multi_processor_count
        self._driver = driver

    def resources(self) -> str:
        """Describe registers and local bytes (spills) a thread, shared bytes a block."""
        attributes = self._driver.CUfunction_attribute
        wanted = {
            "registers": attributes.CU_FUNC_ATTRIBUTE_NUM_REGS,
            "local": attributes.CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES,
            "shared": attributes.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES,
        }
        found = {name: _checked(self._driver.cuFuncGetAttribute(a, self._function)) for name, a in wanted.items()}
        return ", ".join(f"{value} {name}" for name, value in found.items())

    def launch(self, blocks: int, job: Job, stream: int) -> None:
        """Enqueue one run of ``job`` on ``stream``; its queue is cleared first."""
        _checked(self._driver.cuCtxSetCurrent(self._context))  # a thread that has not used CUDA yet has none
        _checked(self._driver.cuMemsetD32Async(job.queue, 0, 1, stream))
        arguments = (ctypes.c_void_p * 1)(ctypes.addressof(job))
        grid, block = (blocks, 1, 1), (self._threads, 1, 1)
        pointer = ctypes.addressof(arguments)
        _checked(self._driver.cuLaunchKernel(self._function, *grid, *block, 0, stream, pointer, 0))


@cache
def load_kernel(device: int, configuration: Configuration) -> Kernel:
    """Return the compiled kernel, made on first use (about a second)."""
    return Kernel(device, configuration)


def _bindings(name: str) -> Any:
    try:
        from cuda.bindings import driver, nvrtc
    except ImportError as error:
        raise UserError(f"the CUDA executor needs NVIDIA's bindings: pip install cuda-bindings ({error})") from error
    return {"driver": driver, "nvrtc": nvrtc}[name]


def _checked(result: tuple[Any, ...]) -> Any:
    """Return the value of a call to the bindings, (status, value...), or raise."""
    status, *values = result
    if int(status) != 0:
        raise RuntimeError(f"CUDA call failed: {status!r}")
    return values[0] if len(values) == 1 else tuple(values) if values else None
