"""Choose how a step is executed (``--execution``).

    eager     kernel by kernel, as the code stands: the reference
    compiled  the backbones through torch.compile, which fuses BatchNorm, ReLU and all else between convolutions
    graph     the whole step captured once as a CUDA graph and replayed: small batches no longer wait for Python
    fused     compiled, then recorded

All four compute the same step: eager and graph launch the same kernels, compiled ones round differently in bfloat16.
"""

import logging
import os
import shutil
import sysconfig
from collections.abc import Callable
from pathlib import Path

import torch

from cocor.config.options import Config
from cocor.distributed.collectives import World
from cocor.step.cores import use_cores
from cocor.step.cudagraph import GraphedStep
from cocor.step.step import Metrics, TrainingStep
from loaders.batch import Batch
from loaders.errors import UserError

_log = logging.getLogger(__name__)
Step = Callable[[Batch, Batch | None, int], Metrics]
LONG_RUN = 10_000  # steps from which compiling pays


def choose(config: Config, world: World, steps: int) -> str:
    """Choose the execution of a run of ``steps`` steps; UserError if it lacks a tool."""
    on_gpu, requested = world.device.type == "cuda", config.execution
    if requested in ("graph", "fused") and not on_gpu:
        raise UserError(f"--execution {requested}: CUDA graphs need a GPU; use --execution eager")
    missing = missing_to_compile(world.device)
    if requested in ("compiled", "fused") and missing is not None:
        other = "graph" if on_gpu else "eager"
        raise UserError(f"--execution {requested}: {missing}; install it, or use --execution {other}")
    if requested == "compiled" and not on_gpu:
        _log.warning("--execution compiled: on a CPU compiling takes minutes and steps get hardly faster")
    if requested != "auto":
        return requested
    if not on_gpu:
        return "eager"
    # As in cocor.config.checks.check: forward-mode derivatives cannot be compiled, LARS cannot be captured.
    # Communication in the network (synchronised BatchNorm) would break the compiled graph at every layer.
    synchronises = config.sync_bn and world.size > 1
    compiles, records = config.consistency != "abs" and not synchronises, config.optimiser != "lars"
    if compiles and steps >= LONG_RUN:
        if missing is None:
            return "fused" if records else "compiled"
        _log.warning(f"not compiled, hence slower than it could be: {missing}")
    return "graph" if records else "eager"


def missing_to_compile(device: torch.device) -> str | None:
    """Say what torch.compile lacks to build C or C++ extensions here, if anything."""
    variable, names = ("CC", ["gcc", "clang"]) if device.type == "cuda" else ("CXX", ["g++"])
    compiler = os.environ.get(variable)
    if not any(map(shutil.which, compiler.split()[:1] if compiler else names)):
        return f"torch.compile needs a compiler, and there is no {compiler or ' or '.join(names)} here"
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        return "torch.compile needs Python's header files, and there is no Python.h here (Debian: python3-dev)"
    return None


def executable(step: TrainingStep, execution: str, parallel: bool | None = None) -> Step:
    """Return ``step`` with the ``execution`` that :func:`choose` returned.

    Load a checkpoint into ``step`` before this, not after it. ``parallel``: see :class:`GraphedStep`.
    """
    if execution in ("compiled", "fused"):
        _log.info("compiling: the first steps take minutes; the compiler keeps its work for later runs")
        compile_backbones(step)
    if step.device.type == "cpu":
        use_cores(step, in_threads=execution == "eager")
    return GraphedStep(step, parallel) if execution in ("graph", "fused") else step


def compile_backbones(step: TrainingStep, backend: str = "inductor") -> None:
    """Compile the backbones of ``step`` in place, at their first use."""
    # The passes of a step differ in gradients, batch size and whether running statistics move: each is compiled apart.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 32)
    for name, module in step.method.named_children():
        if name.endswith("backbone"):
            module.compile(dynamic=False, backend=backend)
