"""Work spread over processes, with results in the order of the tasks and no way to hang.

A worker that dies (killed, out of memory, crashed in a decoder) ends the run with a message within seconds. A parent
that dies takes its workers along: the kernel kills them, whatever they are doing.
"""

import ctypes
import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

from loaders.errors import UserError

Task = TypeVar("Task")
Result = TypeVar("Result")

_PR_SET_PDEATHSIG = 1
_AHEAD = 3  # tasks a worker that are handed out in advance
_HEAVY_PIXELS = 32_000_000
_heavy: AbstractContextManager = nullcontext()  # in a worker: a lock that all workers share


def one_at_a_time(pixels: int) -> AbstractContextManager:
    """A context for decoding: huge images take turns, so that memory stays bounded whatever the number of workers."""
    return _heavy if pixels > _HEAVY_PIXELS else nullcontext()


def in_order(
    function: Callable[[Task], Result], tasks: Iterable[Task], workers: int, name: Callable[[int], str]
) -> Generator[Result, None, None]:
    """Yield ``function(task)`` for every task, in order, computed by ``workers`` processes.

    ``function`` must be importable (a top-level function or a partial of one). ``name`` says what the i-th
    task was about, for the :class:`UserError` that is raised if a worker dies.
    """
    context = multiprocessing.get_context("spawn")  # a fork of a process with threads may inherit a held lock
    pool = ProcessPoolExecutor(workers, context, initializer=_start_worker, initargs=(os.getpid(), context.Lock()))
    pending: deque[Future[Result]] = deque()
    remaining = iter(tasks)
    done = 0
    try:
        while True:
            for task in remaining:
                pending.append(pool.submit(function, task))
                if len(pending) >= workers * _AHEAD:
                    break
            if not pending:
                return
            result = pending.popleft().result()
            done += 1
            yield result
    except BrokenProcessPool:
        raise UserError(
            f"a worker process died at or soon after {name(done)} (killed, out of memory, or a crash); "
            "nothing was kept: run again, with fewer --workers if memory is short"
        ) from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _start_worker(parent: int, heavy: AbstractContextManager) -> None:
    """Die with the parent, and leave Ctrl-C to it."""
    global _heavy
    _heavy = heavy
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    except (AttributeError, OSError):  # not Linux: workers end when they find the pipe to the parent closed
        return
    if os.getppid() != parent:  # it died before the kernel knew
        os._exit(1)
