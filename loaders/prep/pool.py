"""Images spread over worker processes, with results in the order of the images."""

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, nullcontext
from multiprocessing import connection
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Semaphore
from typing import TypeVar

from loaders.cpus import available_cores
from loaders.errors import UserError
from loaders.progress import track
from loaders.text import printable

Item = TypeVar("Item")
Result = TypeVar("Result")

_CHUNK = 8  # images a task
_AHEAD = 8  # tasks per worker that are handed out, or done and waiting for an earlier one
_HUGE_PIXELS = 32_000_000
_LOOK_S = 1.0
_huge: Semaphore | None = None  # in a worker


def one_at_a_time(pixels: int) -> AbstractContextManager[object]:
    """Context for decoding: huge images take turns across workers, so that memory stays bounded."""
    return nullcontext() if _huge is None or pixels <= _HUGE_PIXELS else _huge


def in_order(
    function: Callable[[Item], Result],
    item: Callable[[int], Item],
    count: int,
    workers: int | None,
    *,
    name: Callable[[int], str],
    doing: str,
) -> Generator[Result, None, None]:
    """Yield ``function(item(i))`` for every i below ``count``, in order, computed by worker processes.

    Args:
        function: importable: a top-level function or a partial of one. Its exceptions pass on to the caller.
        item: makes the i-th argument, which should be small.
        workers: the number of processes; None for one a core.
        name: says what the i-th image is called.
        doing: the word of the progress line.

    Raises:
        UserError: a worker died (killed, out of memory, crashed in a decoder); names the image.
    """
    starts = range(0, count, _CHUNK)
    workers = max(1, min(workers or available_cores(), len(starts)))
    context = multiprocessing.get_context("spawn")  # a fork of a process with threads may inherit a held lock
    waiting, held = context.Pipe(duplex=False)
    pool = ProcessPoolExecutor(workers, context, _begin, (waiting, context.Semaphore()))

    def chunks() -> Iterator[list[Result]]:
        pending: deque[Future[list[Result]]] = deque()
        given = 0
        for done, start in enumerate(starts):
            try:
                for at in starts[given : done + _AHEAD * workers]:
                    items = [item(i) for i in range(at, min(at + _CHUNK, count))]
                    pending.append(pool.submit(_apply, function, items))
                    given += 1
                result = _result(pool, pending.popleft())
            except BrokenProcessPool:
                raise UserError(
                    f"a worker process died at or soon after {printable(name(start))} (killed, out of memory, or a "
                    "crash); nothing was kept: run again, with fewer --workers if memory is short"
                ) from None
            yield result

    try:
        for chunk in track(chunks(), count, doing, "images", _CHUNK):
            yield from chunk
    finally:
        held.close()  # the workers end at once, whatever they are doing
        pool._result_queue._writer.close()  # type: ignore[attr-defined]  # else half a result is read for ever
        pool.shutdown(cancel_futures=True)
        waiting.close()


def _result(pool: ProcessPoolExecutor, future: Future[Result]) -> Result:
    # A worker that is killed while it writes a result leaves the pool waiting for the rest of it: look as well.
    while not wait([future], timeout=_LOOK_S).done:
        if connection.wait([process.sentinel for process in pool._processes.values()], timeout=0):
            raise BrokenProcessPool
    return future.result()


def _apply(function: Callable[[Item], Result], items: list[Item]) -> list[Result]:
    return [function(item) for item in items]


def _begin(waiting: Connection, huge: Semaphore) -> None:
    """Prepare a worker: ignore Ctrl-C, and end once the other end of ``waiting`` is closed, or its process dead."""
    global _huge
    _huge = huge
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=lambda: waiting.poll(None) and os._exit(1), daemon=True).start()
