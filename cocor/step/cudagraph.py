"""Capture a training step once as a CUDA graph, and replay it from then on."""

import gc
from collections import Counter
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor, nn

from cocor.step.step import Metrics, TrainingStep
from loaders.batch import Batch
from loaders.errors import UserError

WARM_UP = 3  # ordinary steps before the capture: they compile, choose algorithms and allocate the optimisers' state
_PARALLEL_BATCH = 128  # images per GPU up to which lengths run concurrently: larger batches may not fit into memory


@dataclass
class _Recording:
    """``compute`` as a CUDA graph that reads ``inputs`` and writes ``values``."""

    graph: torch.cuda.CUDAGraph
    inputs: tuple[Batch, Batch | None]
    shapes: dict[str, torch.Size]  # of the metrics
    values: Tensor

    def fits(self, *batches: Batch | None) -> bool:
        return list(map(_layout, self.inputs)) == list(map(_layout, batches))

    def __call__(self, *batches: Batch | None) -> Metrics:
        for own, new in zip(self.inputs, batches, strict=True):
            for target, source in zip(_tensors(own), _tensors(new), strict=True):
                target.copy_(source, non_blocking=True)
        self.graph.replay()
        values = self.values.clone().split([shape.numel() for shape in self.shapes.values()])
        return {name: value.view(shape) for (name, shape), value in zip(self.shapes.items(), values, strict=True)}


class GraphedStep:
    """A training step as one CUDA graph.

    The first steps run as usual: they may allocate, compile and choose algorithms, which a capture must not. Then
    ``compute`` is captured with input tensors of its own; from there on a step copies its batch into these and replays
    the graph. With ``parallel`` the lengths run on streams of their own, beside the contrastive part, to fill the GPU.
    That takes the memory of all passes at once, so that by default only small batches do it.

    Steps with and without a labelled batch have a graph each, captured after the first steps of that kind. The two
    share a memory pool, as neither needs what the other has left there. Which lengths a step trains on does not matter
    to a graph, only how many.

    A batch of other shapes than the captured ones is an ordinary step.
    """

    def __init__(self, step: TrainingStep, parallel: bool | None = None) -> None:
        self._step = step
        self._parallel = parallel
        self._ordinary: Counter[bool] = Counter()  # ordinary steps so far, with (True) and without a labelled batch
        self._recordings: dict[bool, _Recording] = {}
        self._stream = torch.cuda.Stream(step.device)
        self._memory = torch.cuda.graph_pool_handle()

    def __call__(self, batch: Batch, labelled: Batch | None, number: int) -> Metrics:
        """Make a step as :class:`cocor.step.step.TrainingStep` does."""
        batch, labelled = self._step.share(batch, labelled, number)
        if not self._ordinary:
            self._begin(batch)
        self._step.set_rates(number)
        return self._step.named(self._compute(batch, labelled), number)

    def _compute(self, batch: Batch, labelled: Batch | None) -> Metrics:
        has_labelled = labelled is not None
        if self._ordinary[has_labelled] < WARM_UP:
            self._ordinary[has_labelled] += 1
            return self._warm_up(batch, labelled)
        if has_labelled not in self._recordings:
            self._recordings[has_labelled] = self._record(batch, labelled)
        recording = self._recordings[has_labelled]
        return recording(batch, labelled) if recording.fits(batch, labelled) else self._step.compute(batch, labelled)

    def _begin(self, batch: Batch) -> None:
        self._step.rates_to_device()
        parallel = self._parallel
        if parallel is None:
            synchronised = any(isinstance(module, nn.SyncBatchNorm) for module in self._step.method.modules())
            parallel = len(batch.index) <= _PARALLEL_BATCH and not synchronised
        self._step.streams.use([torch.cuda.Stream(self._step.device) for _ in batch.composites] if parallel else [])

    def _warm_up(self, batch: Batch, labelled: Batch | None) -> Metrics:
        """Make an ordinary step, on the stream of the capture."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            metrics = self._step.compute(batch, labelled)
        torch.cuda.current_stream().wait_stream(self._stream)
        torch.cuda.synchronize()  # nothing of these few steps is in flight when its memory is used again
        return metrics

    def _record(self, batch: Batch, labelled: Batch | None) -> _Recording:
        inputs = _clone(batch), None if labelled is None else _clone(labelled)
        self._step.optimiser.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        gc.collect()
        gc.disable()  # an older graph that is freed during a capture would break it
        # Other threads (loaders, NCCL's watchdog) go on using the device meanwhile.
        recording = torch.cuda.graph(graph, self._memory, self._stream, capture_error_mode="thread_local")
        try:
            with recording:
                metrics = self._step.compute(*inputs)
                values = torch.cat([value.detach().float().flatten() for value in metrics.values()])
        except RuntimeError as error:
            for cause in (error, error.__context__):  # ending a broken capture raises an error of its own
                if isinstance(cause, torch.OutOfMemoryError):
                    raise cause from None
            reason = str(error.__context__ or error).strip().splitlines()[0]
            problem = f"--execution: this network's step cannot be recorded as a CUDA graph ({reason})"
            raise UserError(f"{problem}; use --execution compiled or eager") from error
        finally:
            gc.enable()
        return _Recording(graph, inputs, {name: value.shape for name, value in metrics.items()}, values)


def _tensors(batch: Batch | None) -> list[Tensor]:
    return [] if batch is None else list(_named(batch).values())


def _named(batch: Batch) -> dict[str, Tensor]:
    values = {field.name: getattr(batch, field.name) for field in fields(batch)}
    return {name: tensor for name, tensor in values.items() if tensor is not None}


def _layout(batch: Batch | None) -> list[tuple[object, ...]]:
    return [(tensor.shape, tensor.dtype, tensor.device) for tensor in _tensors(batch)]


def _clone(batch: Batch) -> Batch:
    return replace(batch, **{name: tensor.clone() for name, tensor in _named(batch).items()})  # keeps the memory format
