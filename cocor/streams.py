"""CUDA streams on which parts of a training step run side by side, where a small batch alone does not fill the GPU."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch


class Streams:
    """Runs parts beside what goes on on the current stream: on streams of their own if some are given by :meth:`use`,
    else on the current one as well."""

    def __init__(self) -> None:
        self._streams: Sequence[torch.cuda.Stream] = ()

    def use(self, streams: Sequence[torch.cuda.Stream]) -> None:
        self._streams = streams

    @contextmanager
    def beside(self, number: int) -> Iterator[None]:
        """Run part ``number`` apart, from here on. The memory of what is made there must live until the step ends."""
        if not self._streams:
            yield
            return
        stream = self._streams[number % len(self._streams)]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            yield

    def join(self) -> None:
        """Let what follows wait for all that runs :meth:`beside`."""
        for stream in self._streams:
            torch.cuda.current_stream().wait_stream(stream)
