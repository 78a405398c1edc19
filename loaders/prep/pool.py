"""Process pool that maps a function over images and yields the results in order."""

import multiprocessing
import os
import signal
import threading
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from multiprocessing import connection
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Semaphore
from typing import Any, TypeVar

from loaders.cpus import available_cores
from loaders.errors import UserError
from loaders.progress import track
from loaders.text import printable

Item = TypeVar("Item")
Result = TypeVar("Result")

_CHUNK = 8  # images a task
_IN_HAND = 2  # tasks that a worker holds, so that it never waits for the next one
_AHEAD = 8  # tasks per worker that are handed out, or done and waiting for an earlier one
_HUGE_PIXELS = 32_000_000
_huge: Semaphore | None = None  # in a worker


def one_at_a_time(pixels: int) -> AbstractContextManager[object]:
    """Return a context in which huge images take turns, so that memory stays bounded."""
    return nullcontext() if _huge is None or pixels <= _HUGE_PIXELS else _huge


def in_order(
    function: Callable[[Item], Result], item: Callable[[int], Item], count: int, workers: int | None, *,
    name: Callable[[int], str], doing: str,
) -> Generator[Result, None, None]:  # fmt: skip
    """Yield ``function(item(i))`` for every i below ``count``, in order.

    Args:
        function: importable: a top-level function or a partial of one. Its exceptions pass on to the caller.
        item: makes the i-th argument, which should be small.
        workers: number of processes; None for one a core.
        name: returns what the i-th image is called.
        doing: word of the progress line.

    Raises:
        UserError: a worker died (killed, out of memory, crashed in a decoder); names the image.
    """
    workers = max(1, min(workers or available_cores(), -(-count // _CHUNK)))
    context = multiprocessing.get_context("spawn")  # a fork of a process with threads may inherit a held lock
    huge, processes = context.Semaphore(), list[BaseProcess]()
    tasks: dict[Connection, deque[int]] = {}  # of each worker: first images of those that it has not answered

    def chunks() -> Iterator[list[Result]]:
        done: dict[int, list[Result]] = {}  # by first image
        given = 0
        for start in range(0, count, _CHUNK):
            while start not in done:
                pipe = min(tasks, key=lambda pipe: len(tasks[pipe]))
                try:
                    if given < min(count, start + _AHEAD * workers * _CHUNK) and len(tasks[pipe]) < _IN_HAND:
                        tasks[pipe].append(given)
                        pipe.send([item(i) for i in range(given, min(given + _CHUNK, count))])
                        given += _CHUNK
                        continue
                    for pipe in connection.wait(list(tasks)):  # type: ignore[assignment]
                        done[tasks[pipe].popleft()] = pipe.recv()
                except (EOFError, OSError):  # it has closed its end, perhaps in the middle of an answer
                    image = printable(name((tasks[pipe] or [start])[0]))
                    raise UserError(
                        f"a worker process died at or soon after {image} (killed, out of memory, or a crash); nothing "
                        "was kept: run again, with fewer --workers if memory is short"
                    ) from None
            answer = done.pop(start)
            if isinstance(answer, Exception):
                raise answer
            yield answer

    try:
        for _ in range(workers):
            ours, theirs = context.Pipe()
            tasks[ours] = deque()
            with theirs:
                processes.append(context.Process(target=_work, args=(theirs, function, huge), daemon=True))
                processes[-1].start()
        for chunk in track(chunks(), count, doing, "images", _CHUNK):
            yield from chunk
    finally:
        for process in processes:
            if process.pid:  # else it could not be started
                process.kill()
                process.join()
        for pipe in tasks:
            pipe.close()


def _work(pipe: Connection, function: Callable[[Any], Any], huge: Semaphore) -> None:
    """Answer tasks with a list of results, or an exception, until the parent ends."""
    global _huge
    _huge = huge
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    warnings.filterwarnings("ignore", module=r"PIL\.")  # as in the parent
    parent: Any = multiprocessing.parent_process()
    threading.Thread(target=lambda: parent.join() or os._exit(1), daemon=True).start()
    with suppress(EOFError, ConnectionError):
        while True:
            items = pipe.recv()
            try:
                answer: object = [function(item) for item in items]
            except Exception as fault:
                answer = fault
            pipe.send(answer)
