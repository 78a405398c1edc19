"""CUDA streams on which parts of a training step run side by side, where a small batch alone does not fill the GPU."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch


class Streams:
    """Runs parts of a step concurrently with the current stream, on streams that :meth:`use` sets; without any, on the
    current stream itself."""

    def __init__(self) -> None:
        self._streams: Sequence[torch.cuda.Stream] = ()

    def use(self, streams: Sequence[torch.cuda.Stream]) -> None:
        self._streams = streams

    @contextmanager
    def beside(self, number: int) -> Iterator[None]:
        """Run the block on the stream of part ``number``, after what the current stream has queued so far. Tensors made
        there must be kept alive until the step ends, as the caching allocator may hand out their memory otherwise."""
        if not self._streams:
            yield
            return
        stream = self._streams[number % len(self._streams)]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            yield

    def join(self) -> None:
        """Let the current stream wait for all that runs :meth:`beside` it."""
        for stream in self._streams:
            torch.cuda.current_stream().wait_stream(stream)
