"""Data workers: which image each one reads, what may end it, and how its batches reach the parent in any case.

Schedulers and terminals signal whole process groups, but the parent may need the worker's data to finish its step. So
only the parent ends a worker, by sending SIGTERM or by exiting. A thread watches for both, since the worker itself may
be stuck in a read.

PyTorch shares a batch's memory with the parent by means of a socket in the temporary folder, which a full disk does not
allow, and of a thread that answers there, which a limit of threads may not allow. What cannot be sent is dropped by
multiprocessing, and where nobody answers it is not noticed at all: the parent would wait forever. Here such batches go
through the pipe instead, copied.
"""

import mmap
import os
import signal
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.queues import Queue
from multiprocessing.reduction import DupFd
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import get_worker_info

_LOOK_SECONDS = 1.0
_IGNORED = (signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)

_shares = True


class Reading:
    """Which image each worker is reading, in memory shared with forked processes."""

    def __init__(self, workers: int) -> None:
        self._index = np.frombuffer(mmap.mmap(-1, 8 * max(1, workers)), np.int64)
        self._index[:] = -1

    @contextmanager
    def image(self, index: int) -> Iterator[None]:
        """While open, this worker is reading image ``index``."""
        worker = get_worker_info()
        place = 0 if worker is None else worker.id
        self._index[place] = index
        try:
            yield
        finally:
            self._index[place] = -1

    def now(self) -> list[int]:
        """The images being read at this moment."""
        return [index for index in self._index.tolist() if index >= 0]


@contextmanager
def starting() -> Iterator[None]:
    """Block signals in workers that are forked meanwhile, until they call :func:`begin`."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (*_IGNORED, signal.SIGTERM))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def begin(number: int) -> None:
    """``worker_init_fn`` of a DataLoader whose items are tuples."""
    global _shares
    _obey_the_parent_only()
    try:
        with open(os.devnull) as file:  # noqa: PTH123 (a file to share, whichever)
            DupFd(file.fileno())  # makes the socket and starts the thread
    except (OSError, RuntimeError):
        _shares = False
    Queue._on_queue_feeder_error = _send_without_sharing  # type: ignore[attr-defined]


def shares() -> bool:
    """Whether tensors can be sent to the parent in shared memory; known once a worker has begun."""
    return _shares


def _send_without_sharing(queue: "Queue[Any]", error: Exception, numbered: tuple[int, Any]) -> None:
    """What multiprocessing calls, in the thread that sends, with what it could not send."""
    number, item = numbered
    if not isinstance(item, tuple) or not any(isinstance(part, Tensor) for part in item):
        traceback.print_exception(error)
        os._exit(1)  # which the parent notices
    queue.put((number, tuple(part.numpy() if isinstance(part, Tensor) else part for part in item)))


def _obey_the_parent_only() -> None:
    """From now on only the parent's SIGTERM, or its exit, ends this worker."""
    for ignored in _IGNORED:
        signal.signal(ignored, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _IGNORED)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    if not _watches():  # any SIGTERM ends the worker, lest nothing does
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])


def _watches() -> bool:
    """Start the thread that looks after the parent; False where none can tell who sent a signal, or may be started."""
    if not hasattr(signal, "sigtimedwait"):
        return False
    try:
        threading.Thread(target=_leave_with, args=(os.getppid(),), daemon=True).start()
    except RuntimeError:
        return False
    return True


def _leave_with(parent: int) -> None:
    while os.getppid() == parent:
        received = signal.sigtimedwait([signal.SIGTERM], _LOOK_SECONDS)
        if received is not None and received.si_pid == parent:
            break
    os._exit(0)
