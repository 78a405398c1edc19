"""Ranks end together: where one leaves for a failure that it alone has seen, the others do not wait for it for ever.

A disk that is full when the main rank writes its last checkpoint, an image that one rank cannot read: the others are,
or will soon be, in a collective that never completes. torchrun ends them after a while, srun does not, and those that
notice complain with a traceback about a rank that has gone. So a rank that fails tells so in the store where the ranks
have met, and a thread on each of the others, which looks there, ends its process with the same exit code and no word:

    the failing rank    :func:`alone` -> its message -> :func:`tell_others` -> waits until all have heard it -> ends
    all others          within :func:`heard`: hear it -> wait until all have heard it -> end

All end by :func:`end`. Python's own way would take down the process group while the peers' connections break, and run
into library threads that want the interpreter back: some ranks would abort, and their exit code would be SIGABRT's.
"""

import atexit
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn, Protocol

_LOOK_SECONDS = 0.5
_PATIENCE = 5.0  # seconds for all ranks to hear it; one that is stopped or unreachable never does
_CODE, _LEAVING, _GONE = "cocor/exit code", "cocor/leaving", "cocor/gone"


class Store(Protocol):
    """What is needed of ``torch.distributed.Store``, and no more: launchers load this module, but not PyTorch."""

    def check(self, keys: list[str]) -> bool: ...

    def get(self, key: str) -> bytes: ...

    def set(self, key: str, value: str) -> None: ...

    def add(self, key: str, amount: int) -> int: ...


class _Company:
    """The ranks that meet in ``store``; ``size`` of them. ``main``: this one may host the store."""

    def __init__(self, store: Store, size: int, main: bool) -> None:
        self._store, self._size, self._main = store, size, main
        self._own_end, self._lock = threading.Event(), threading.Lock()
        self._watcher = threading.Thread(target=self._watch, name="cocor-leaving", daemon=True)
        self._watcher.start()
        atexit.register(self.close)  # a thread within the store's C++ when Python ends would abort the process

    def ignore(self) -> None:
        """From now on this rank ends by itself."""
        with self._lock:
            self._own_end.set()

    def tell(self, code: int) -> None:
        """This rank is leaving; returns when all others are as well, or do not answer."""
        self.ignore()
        try:
            self._store.set(_CODE, str(code))
            self._leave()
        except (RuntimeError, OSError, ValueError):  # the store's host has left before
            pass

    def close(self) -> None:
        """Nobody has failed, or this process ends."""
        self._own_end.set()
        self._watcher.join(_PATIENCE)
        atexit.unregister(self.close)

    def _watch(self) -> None:
        try:
            while not self._own_end.wait(_LOOK_SECONDS):
                if self._store.check([_LEAVING]):
                    break
            with self._lock:  # nothing of this rank's own end is cut off
                if not self._own_end.is_set():
                    code = int(self._store.get(_CODE))
                    self._leave()
                    os._exit(code)
        except (RuntimeError, OSError, ValueError):  # the store's host has gone without a word
            return

    def _leave(self) -> None:
        """Returns when all ranks are leaving; the main one when all others have seen that, and need no store."""
        deadline = time.monotonic() + _PATIENCE
        self._store.add(_LEAVING, 1)
        self._wait(_LEAVING, self._size, deadline)
        if self._main:
            self._wait(_GONE, self._size - 1, deadline)
        else:
            self._store.add(_GONE, 1)

    def _wait(self, key: str, count: int, deadline: float) -> None:
        while self._store.add(key, 0) < count and time.monotonic() < deadline:
            time.sleep(0.02)


_company: _Company | None = None


@contextmanager
def heard(store: Store, size: int, main: bool) -> Iterator[None]:
    """Within, and after an exception until this process ends, it ends when another of the ``size`` ranks fails.
    ``main``: this is the rank that hosts ``store``, if a rank does."""
    global _company
    _company = _Company(store, size, main)
    yield
    _company.close()
    _company = None


def end(code: int) -> NoReturn:
    """End this process with exit code ``code``, once all has been done that is to be done at its exit."""
    with suppress(Exception):
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # a closed terminal, a full disk
            stream.flush()
    os._exit(code)


def alone() -> None:
    """This rank has failed and ends by itself, whatever the others do: it has yet to say why."""
    if _company is not None:
        _company.ignore()


def tell_others(code: int) -> None:
    """This rank is about to end with exit code ``code``, for what the others may not know of, and has said why."""
    if _company is not None:
        _company.tell(code)
