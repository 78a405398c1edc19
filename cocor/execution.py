"""How a training step is executed: as written, compiled, recorded as a CUDA graph, or both (``--execution``).

    eager     kernel by kernel, as the code stands: the reference
    compiled  the backbones through torch.compile, which joins BatchNorm, ReLU and what lies between convolutions
    graph     the whole step recorded once and played back in a single launch: small batches no longer wait for Python
    fused     compiled, then recorded

Measured on an H100 with ``benchmarks/step.py``; README, "Speed", has the table. All four make the same step: eager and
graph launch the same kernels, compiled ones round differently in bfloat16.
"""

import gc
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import fields

import torch
from torch import Tensor, nn

from cocor.config import Config
from cocor.distributed import World
from cocor.step import Metrics, TrainingStep
from loaders.batch import Batch
from loaders.cache import user_cache
from loaders.errors import UserError

_log = logging.getLogger(__name__)
Step = Callable[[Batch, Batch | None, int], Metrics]
WARM_UP = 3  # ordinary steps before the recording: they compile, choose algorithms and make the optimisers' moments
LONG_RUN = 10_000  # steps from which on compiling pays
_PARALLEL_BATCH = 128  # images a GPU up to which the lengths run side by side, which then still fits into memory


def choose(config: Config, world: World, steps: int) -> str:
    """What ``--execution`` means for a run of ``steps`` steps here. ``auto`` compiles only runs that are long enough to
    win back the minutes that it takes.

    Raises:
        UserError: CUDA graphs without a GPU.
    """
    on_gpu, asked = world.device.type == "cuda", config.execution
    if asked in ("graph", "fused") and not on_gpu:
        raise UserError(f"--execution {asked}: CUDA graphs need a GPU; use --execution compiled or eager")
    if asked != "auto":
        return asked
    if not on_gpu:
        return "eager"
    # As in cocor.config.check: forward derivatives cannot be compiled, LARS cannot be recorded. Communication within
    # the network would cut what is compiled into pieces, two a layer.
    compiles, records = config.consistency != "abs" and not _synchronises(config, world), config.optimiser == "sgd"
    if compiles and steps >= LONG_RUN:
        return "fused" if records else "compiled"
    return "graph" if records else "eager"


def _synchronises(config: Config, world: World) -> bool:
    return config.sync_bn and world.size > 1


def executable(step: TrainingStep, execution: str, parallel: bool | None = None) -> Step:
    """``step``, to be called like it, executed in the way that :func:`choose` has chosen.

    Call it after the step has got the state from which it goes on. ``parallel``: see :class:`RecordedStep`.
    """
    if execution in ("compiled", "fused"):
        _log.info("compiling: the first steps take minutes; the compiler keeps its work for later runs")
        compile_backbones(step.method)
    return RecordedStep(step, parallel) if execution in ("graph", "fused") else step


def compile_backbones(method: nn.Module, backend: str = "inductor") -> None:
    """Compile the backbones of ``method`` in place, at their first use; names of parameters stay as they are."""
    # Beside the other caches rather than in /tmp, which machines empty and do not share.
    with suppress(OSError):
        folder = user_cache() / "compiled"
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder))
    # The passes of a step differ in gradients, batch size and whether running statistics move: one program for each.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 32)
    for name, module in method.named_children():
        if name.endswith("backbone"):
            module.compile(dynamic=False, backend=backend)


@contextmanager
def uncompiled() -> Iterator[None]:
    """Run compiled modules as written: for evaluation, whose odd batch sizes would each be compiled."""
    with torch.compiler.set_stance("force_eager"):
        yield


class RecordedStep:
    """A training step as one CUDA graph.

    The first steps run as usual, since only these may allocate, compile and choose. Then ``compute`` is recorded with
    its own input tensors; from there on a step copies its batch into these and plays the recording back. With
    ``parallel`` the lengths run on streams of their own, beside the contrastive part, to fill the GPU; by default small
    batches do, for it takes the memory of all passes at once.

    A batch of other shapes than the recorded ones is an ordinary step.
    """

    def __init__(self, step: TrainingStep, parallel: bool | None = None) -> None:
        self._step = step
        self._parallel = parallel
        self._ordinary = 0  # steps made
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs: tuple[Batch, Batch | None] | None = None
        self._names: list[str] = []
        self._values = torch.empty(0)
        self._stream = torch.cuda.Stream(step.device)

    def __call__(self, batch: Batch, labelled: Batch | None, number: int) -> Metrics:
        """As :class:`cocor.step.TrainingStep`."""
        if self._ordinary == 0:
            self._begin(batch)
        self._step.set_rates(number)
        if self._ordinary < WARM_UP:
            self._ordinary += 1
            return self._warm_up(batch, labelled)
        if self._graph is None:
            self._record(batch, labelled)
        assert self._graph is not None and self._inputs is not None
        if not all(_alike(a, b) for a, b in zip(self._inputs, (batch, labelled), strict=True)):
            return self._step.compute(batch, labelled)
        for own, new in zip(self._inputs, (batch, labelled), strict=True):
            _copy(own, new)
        self._graph.replay()
        return dict(zip(self._names, self._values.clone().unbind(), strict=True))

    def _begin(self, batch: Batch) -> None:
        self._step.rates_to_device()
        parallel = self._parallel
        if parallel is None:
            synchronised = any(isinstance(module, nn.SyncBatchNorm) for module in self._step.method.modules())
            parallel = len(batch.index) <= _PARALLEL_BATCH and not synchronised
        self._step.streams = [torch.cuda.Stream(self._step.device) for _ in batch.composites] if parallel else []

    def _warm_up(self, batch: Batch, labelled: Batch | None) -> Metrics:
        """An ordinary step, on the stream of the recording: what PyTorch remembers of a stream then fits both."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            metrics = self._step.compute(batch, labelled)
        torch.cuda.current_stream().wait_stream(self._stream)
        torch.cuda.synchronize()  # nothing of these few steps is in flight when its memory is used again
        return metrics

    def _record(self, batch: Batch, labelled: Batch | None) -> None:
        self._inputs = _clone(batch), None if labelled is None else _clone(labelled)
        self._step.optimiser.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        gc.collect()  # an older recording that is freed during this one would break it
        # Other threads (loaders, NCCL's watchdog) go on with their work meanwhile.
        recording = torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local")
        try:
            with _no_garbage_collection(), recording:
                metrics = self._step.compute(*self._inputs)
                self._names = list(metrics)
                self._values = torch.stack([metrics[name].detach().float() for name in self._names])
        except RuntimeError as error:
            for cause in (error, error.__context__):  # ending a broken recording fails as well
                if isinstance(cause, torch.OutOfMemoryError):
                    raise cause from None
            reason = str(error.__context__ or error).strip().splitlines()[0]
            told = f"--execution: this network's step cannot be recorded as a CUDA graph ({reason})"
            raise UserError(f"{told}; use --execution compiled or eager") from error
        self._graph = graph


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _tensors(batch: Batch | None) -> list[Tensor]:
    return [] if batch is None else [getattr(batch, field.name) for field in fields(batch)]


def _alike(own: Batch | None, new: Batch | None) -> bool:
    def layout(batch: Batch | None) -> list[tuple[object, ...]]:
        return [(tensor.shape, tensor.dtype, tensor.device) for tensor in _tensors(batch)]

    return layout(own) == layout(new)


def _copy(own: Batch | None, new: Batch | None) -> None:
    for target, source in zip(_tensors(own), _tensors(new), strict=True):
        target.copy_(source, non_blocking=True)


def _clone(batch: Batch) -> Batch:
    return type(batch)(*(tensor.clone() for tensor in _tensors(batch)))  # keeps the memory format
