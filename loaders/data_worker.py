"""What goes on in a data worker besides its work: which image it reads, and how it takes signals.

Schedulers and terminals signal whole groups of processes, but what the parent still does may need the worker's data.
So only the parent may end it: by a SIGTERM of its own, or by being gone. A thread looks after that, since the worker
may be waiting for a disk that does not answer.
"""

import mmap
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from torch.utils.data import get_worker_info

_LOOK_SECONDS = 1.0
_IGNORED = (signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)


class Reading:
    """Which image each worker reads at this moment, in memory that forked processes share."""

    def __init__(self, workers: int) -> None:
        self._index = np.frombuffer(mmap.mmap(-1, 8 * max(1, workers)), np.int64)
        self._index[:] = -1

    @contextmanager
    def image(self, index: int) -> Iterator[None]:
        """Within, this worker reads image ``index``."""
        worker = get_worker_info()
        place = 0 if worker is None else worker.id
        self._index[place] = index
        try:
            yield
        finally:
            self._index[place] = -1

    def now(self) -> list[int]:
        return [index for index in self._index.tolist() if index >= 0]


@contextmanager
def starting() -> Iterator[None]:
    """Workers that are forked within take no signal before they :func:`obey_the_parent_only`."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (*_IGNORED, signal.SIGTERM))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def obey_the_parent_only(number: int) -> None:
    """For a worker at its start."""
    for ignored in _IGNORED:
        signal.signal(ignored, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _IGNORED)
    tells_senders = hasattr(signal, "sigtimedwait")  # elsewhere any SIGTERM ends the worker
    signal.pthread_sigmask(signal.SIG_BLOCK if tells_senders else signal.SIG_UNBLOCK, [signal.SIGTERM])
    if tells_senders:
        threading.Thread(target=_leave_with, args=(os.getppid(),), daemon=True).start()


def _leave_with(parent: int) -> None:
    while os.getppid() == parent:
        received = signal.sigtimedwait([signal.SIGTERM], _LOOK_SECONDS)
        if received is not None and received.si_pid == parent:
            break
    os._exit(0)
