"""Work spread over processes, with results in the order of the tasks. Nothing can hang.

The parent talks to each worker through a pipe of its own, and nothing else is shared: no queue, lock or shared memory
that a killed process could leave held or behind. A worker that dies (killed, out of memory, crashed in a decoder)
closes its pipe and ends the run with a message at once. A parent that dies takes its workers along: the kernel kills
them, whatever they are doing.
"""

import contextlib
import ctypes
import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import TypeVar

from loaders.errors import UserError

Task = TypeVar("Task")
Result = TypeVar("Result")

_PR_SET_PDEATHSIG = 1
_AHEAD = 2  # tasks handed to a worker: the one it works on and the next
_WINDOW = 8  # results per worker that may wait for an earlier one
_HEAVY_PIXELS = 32_000_000
_token: tuple[Connection, Connection] | None = None  # in a worker: the pipe with the one token for heavy work


@contextlib.contextmanager
def one_at_a_time(pixels: int) -> Iterator[None]:
    """A context for decoding: huge images take turns across workers, so that memory stays bounded."""
    if _token is None or pixels <= _HEAVY_PIXELS:
        yield
        return
    taken, given = _token
    byte = os.read(taken.fileno(), 1)
    try:
        yield
    finally:
        os.write(given.fileno(), byte)


def in_order(
    function: Callable[[Task], Result], tasks: Iterable[Task], workers: int, name: Callable[[int], str]
) -> Generator[Result, None, None]:
    """Yield ``function(task)`` for every task, in order, computed by ``workers`` processes.

    ``function`` must be importable (a top-level function or a partial of one) and tasks small. ``name`` says what the
    i-th task was about, for the :class:`UserError` that is raised if a worker dies. An exception in ``function``
    passes on to the caller.
    """
    context = multiprocessing.get_context("spawn")  # a fork of a process with threads may inherit a held lock
    token = context.Pipe(duplex=False)
    os.write(token[1].fileno(), b"x")
    processes: list[SpawnProcess] = []
    pipes: dict[Connection, deque[int]] = {}  # to each worker, and the tasks that it has
    try:
        for _ in range(workers):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(theirs, function, token, os.getpid()), daemon=True)
            process.start()
            theirs.close()  # so that its end shows here
            processes.append(process)
            pipes[ours] = deque()
        yield from _collect(pipes, tasks, name)
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.join()
            process.close()
        for pipe in (*pipes, *token):
            pipe.close()


def _collect(
    pipes: dict[Connection, deque[int]], tasks: Iterable[Task], name: Callable[[int], str]
) -> Generator[Result, None, None]:
    """Keep every worker supplied with tasks; yield results in the order of the tasks."""
    numbered = enumerate(tasks)
    ready: dict[int, Result] = {}
    turn, more = 0, True
    while True:
        for pipe, given in sorted(pipes.items(), key=lambda item: len(item[1])):
            while more and len(given) < _AHEAD and len(ready) < _WINDOW * len(pipes):
                number, task = next(numbered, (-1, None))
                if number < 0:
                    more = False
                    break
                given.append(number)
                _send(pipe, task, given, name)
        if not more and not any(pipes.values()) and not ready:
            return
        answering = set(wait([pipe for pipe, given in pipes.items() if given]))
        for pipe, given in pipes.items():
            if pipe not in answering:
                continue
            result, fault = _receive(pipe, given, name)
            if fault is not None:
                raise fault
            ready[given.popleft()] = result
        while turn in ready:
            yield ready.pop(turn)
            turn += 1


def _send(pipe: Connection, task: object, given: deque[int], name: Callable[[int], str]) -> None:
    try:
        pipe.send(task)
    except OSError:
        raise _death(given, name) from None


def _receive(pipe: Connection, given: deque[int], name: Callable[[int], str]) -> tuple:
    try:
        return pipe.recv()
    except (EOFError, OSError):
        raise _death(given, name) from None


def _death(given: deque[int], name: Callable[[int], str]) -> UserError:
    return UserError(
        f"a worker process died at or soon after {name(given[0])} (killed, out of memory, or a crash); nothing was "
        "kept: run again, with fewer --workers if memory is short"
    )


def _work(pipe: Connection, function: Callable, token: tuple[Connection, Connection], parent: int) -> None:
    """A worker process: answer tasks until the pipe closes, ignore Ctrl-C, die with the parent."""
    global _token
    _token = token
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(AttributeError, OSError):  # not Linux: the closed pipe has to do
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before the kernel knew
            return
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            task = pipe.recv()
            try:
                answer: tuple = (function(task), None)
            except Exception as fault:  # a mistake in the program: the parent raises it
                answer = (None, fault)
            pipe.send(answer)
