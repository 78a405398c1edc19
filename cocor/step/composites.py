"""Compute the consistency loss of a batch's composites, and its gradient.

    begin   embeddings, targets and similarities, length by length, each with its gradient
    finish  the consistency loss of all lengths together (``cocor.objective.consistency``)
    add     slope_l times the gradient of length l, on top of the contrastive gradient

The gradient of each length is kept by itself, because the exact hyper-gradient needs its inner product with the
cross-entropy's. The consistency loss then needs no backward pass of its own: its gradient is a linear combination.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor, nn

from cocor.config.options import Config
from cocor.distributed.collectives import mean_over_ranks
from cocor.methods.base import Method, normalised
from cocor.objective.consistency import Consistency, abs_loss, latent_similarity, pull_loss, softplus_loss
from loaders.batch import Batch

Item = TypeVar("Item")
Timer = Callable[[str], AbstractContextManager[object]]


class Streams:
    """Run parts of a step beside each other, as one may not fill a GPU or a CPU.

    They run on CUDA streams or in threads of their own. Without any, which :meth:`use` and :meth:`use_threads` set,
    they run where they are called.
    """

    def __init__(self) -> None:
        self._streams: Sequence[torch.cuda.Stream] = ()
        self._threads: ThreadPoolExecutor | None = None
        self.on_close = ExitStack()

    def use(self, streams: Sequence[torch.cuda.Stream]) -> None:
        self._streams = streams

    def use_threads(self, count: int) -> None:
        """Run parts in ``count`` threads, which share operations with as many as this one."""
        pool = ThreadPoolExecutor(count, "lengths", torch.set_num_threads, (torch.get_num_threads(),))
        self._threads = self.on_close.enter_context(pool)

    def close(self) -> None:
        """End the threads, and do what else is to be done then."""
        self.on_close.close()

    def run(self, number: int, part: Callable[[], Item]) -> Callable[[], Item]:
        """Start ``part`` as number ``number``, after what is queued so far.

        Returns a function that waits for its thread and returns its result. Tensors made on a stream must be kept alive
        until the step ends, as the caching allocator may hand out their memory otherwise.
        """
        if self._threads is not None:
            future = self._threads.submit(part)
            return lambda: part() if future.cancel() else future.result()  # here and now, if no thread has begun it
        if not self._streams:
            result = part()
        else:
            stream = self._streams[number % len(self._streams)]
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                result = part()
        return lambda: result

    def join(self) -> None:
        """Let the current stream wait for all streams that :meth:`run` has used."""
        for stream in self._streams:
            torch.cuda.current_stream().wait_stream(stream)


@dataclass
class Started:
    """The lengths of a batch, or of a part of one, which may still be under way."""

    target: Tensor  # (L, B) with the MMNN's graph
    originals: Tensor  # (B, d)
    results: list[Callable[[], tuple[Tensor, Sequence[Tensor]]]]  # per length: similarity (B,), its gradients


@dataclass
class Lengths:
    """The similarities of a batch, length by length."""

    target: Tensor  # (L, B) with the MMNN's graph
    originals: Tensor  # (B, d)
    gradients: list[Sequence[Tensor]]  # per length, one tensor per parameter, see CompositeTerm._gradients
    similarity: list[Tensor]  # per length (B,), detached


@dataclass
class CompositeGradients:
    """The consistency loss of a batch, and what the rest of the step needs."""

    consistency: Consistency
    target: Tensor  # as in Lengths
    originals: Tensor
    gradients: list[Sequence[Tensor]]


class CompositeTerm:
    """The consistency loss, added to the gradient of the encoder's ``parameters``.

    ``target`` maps composition vectors to the similarities that are aimed at. ``autocast()`` is the context in which
    networks run; lengths run beside each other on ``streams``.
    """

    def __init__(self, config: Config, method: Method, target: nn.Module, parameters: Sequence[Tensor], *,
                 autocast: Callable[[], AbstractContextManager[None]], streams: Streams) -> None:  # fmt: skip
        self._method, self._target, self._parameters = method, target, parameters
        self._of_samples, self._parts = config.consistency == "abs", config.accumulate
        self._loss: Callable[..., Consistency]
        if config.mmnn == "none":
            self._loss = partial(pull_loss, weight=config.consistency_weight)
        elif self._of_samples:
            self._loss = partial(abs_loss, weight=config.consistency_weight)
        else:
            beta, sign = config.consistency_beta, config.consistency_sign
            self._loss = partial(softplus_loss, weight=config.consistency_weight, beta=beta, sign=sign)
        self._autocast, self._streams = autocast, streams

    def run_in_threads(self, count: int, method: Method) -> None:
        """Run the lengths in threads, by this copy of the method."""
        self._method = method
        self._streams.use_threads(count)

    def begin(self, batch: Batch, timer: Timer) -> Started:
        """Start computing similarities and gradients, which may run on when this returns."""
        count = len(batch.composites)
        with timer("original"):
            originals = self.originals(batch)
            target = self._target(batch.composition)

        def length(number: int) -> tuple[Tensor, Sequence[Tensor]]:
            with timer("composites"):
                with self._autocast():
                    embedding = self._method.embed_composite(batch.composites[number])
                similarity = latent_similarity(embedding[None], originals)[0]
                gradients = self._gradients(similarity, target[number], count)
                return similarity.detach(), gradients

        return Started(target, originals, [self._streams.run(at, partial(length, at)) for at in range(count)])

    def joined(self, lengths: Lengths | None, started: Started) -> Lengths:
        """Wait for ``started``, the next part of the batch, and append it; gradients add up."""
        self._streams.join()
        results = [result() for result in reversed(started.results)][::-1]  # threads begin with the first
        gradients, similarity = [own for _, own in results], [one for one, _ in results]
        more = Lengths(started.target, started.originals, gradients, similarity)
        if lengths is None:
            return more
        pairs = zip(lengths.gradients, more.gradients, strict=True)
        return Lengths(
            torch.cat([lengths.target, more.target], 1),
            torch.cat([lengths.originals, more.originals]),
            [list(torch._foreach_add(list(own), list(new))) for own, new in pairs],
            [torch.cat(pair) for pair in zip(lengths.similarity, more.similarity, strict=True)],
        )

    def finish(self, lengths: Lengths) -> CompositeGradients:
        """Compute the consistency loss of all lengths."""
        consistency = self.consistency(torch.stack(lengths.similarity), lengths.target)
        return CompositeGradients(consistency, lengths.target, lengths.originals, lengths.gradients)

    def add(self, composites: CompositeGradients) -> dict[str, Tensor]:
        """Add the consistency loss's gradient to the contrastive one in ``.grad``.

        Returns the norms of both on this rank's own images. Their means over ranks are logged: the norms of the global
        batch would take both gradients to travel apart, twice as much as their sum.
        """
        gradients = composites.gradients
        slopes = [1.0] * len(gradients) if self._of_samples else composites.consistency.slope
        added = torch._foreach_mul(list(gradients[0]), slopes[0])
        for number in range(1, len(gradients)):
            torch._foreach_add_(added, torch._foreach_mul(list(gradients[number]), slopes[number]))
        total = [parameter.grad for parameter in self._parameters if parameter.grad is not None]  # all of them
        norms = [torch.stack(torch._foreach_norm(part)).norm() for part in (total, added)]
        torch._foreach_add_(total, added)
        return {"gradient_contrastive": norms[0], "gradient_consistency": norms[1]}

    def originals(self, batch: Batch) -> Tensor:
        """Embed originals, (B, d); of several, the normalised mean."""
        with self._autocast():
            embedding = self._method.embed_original(batch.original)
        return normalised(embedding.view(-1, len(batch.index), embedding.shape[1]).mean(0))

    def consistency(self, similarity: Tensor, target: Tensor) -> Consistency:
        """Compute the consistency loss of ``similarity`` (L, B) with ``target`` (L, B)."""
        return self._loss(similarity, target, mean_over_ranks=mean_over_ranks)

    def _gradients(self, similarity: Tensor, target: Tensor, lengths: int) -> Sequence[Tensor]:
        """Return a part's share in gradients of a length's mean similarity or, for abs, of its loss."""
        # The slope of the softplus loss depends on the mean alone, so add() can multiply by it later; that of the abs
        # loss differs between samples.
        output = self._loss(similarity[None], target[None]).loss / lengths if self._of_samples else similarity.mean()
        return torch.autograd.grad(output / self._parts, self._parameters, materialize_grads=True)
