"""Ranks end together: where one leaves for a failure that it alone has seen, the others do not wait for it for ever.

A disk that is full when the main rank writes its last checkpoint, an image that one rank cannot read: the others are,
or will soon be, in a collective that never completes. torchrun ends them after a while, srun does not, and those that
notice complain with a traceback about a rank that has gone. So a rank that fails tells so in the store where the ranks
have met, and a thread on each of the others, which looks there, ends its process with the same exit code and no word:

    the failing rank    :func:`alone` -> its message -> :func:`tell_others` -> waits until all have heard it -> ends
    all others          from :func:`listen` on: hear it -> wait until all have heard it -> end

So does one that a signal, which the others may not have got, ends at once. A rank can tell from the moment on in which
it says that it is there (:func:`meet`), since the others may then wait for it, and listens once all are there. A store
whose host is stopped or cannot be reached would not answer for hours: it is not waited for.

All end by :func:`end`. Python's own way would take down the process group while the peers' connections break, and run
into library threads that want the interpreter back: some ranks would abort, and their exit code would be SIGABRT's.
"""

import atexit
import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import NoReturn, Protocol, TypeVar

_LOOK_SECONDS = 0.5
_PATIENCE = 5.0  # seconds for all ranks to hear it; one that is stopped or unreachable never does
_ANSWER = 2.0  # seconds for a store to answer
_FLUSHING = 1.0  # seconds for what was printed to be read, by a terminal or a pipe
_CODE, _LEAVING, _GONE, _DONE = "cocor/exit code", "cocor/leaving", "cocor/gone", "cocor/done"  # keys of the store

T = TypeVar("T")


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
        self._own_end, self._told = threading.Event(), False
        self._lock = threading.RLock()  # a signal may end this rank while it is ending
        self._watcher: threading.Thread | None = None

    def listen(self) -> None:
        """From now on this rank ends when another one does."""
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
        if self._told:  # a signal has interrupted what follows
            return
        self._told = True
        with suppress(RuntimeError, OSError, ValueError):  # the store's host has left before, or does not answer
            _in_time(_PATIENCE, lambda: self._leave(code))

    def part(self) -> None:
        """This rank is done; others that fail later need not wait for it."""
        with suppress(RuntimeError, OSError, ValueError):
            asked(lambda: self._store.add(_DONE, 1))
        self.close()

    def close(self) -> None:
        """This process ends."""
        self._own_end.set()
        if self._watcher is not None:
            self._watcher.join(_PATIENCE)
        atexit.unregister(self.close)

    def _watch(self) -> None:
        try:
            while not self._own_end.wait(_LOOK_SECONDS):
                if self._store.check([_LEAVING]):
                    break
            code = None if self._own_end.is_set() else int(self._store.get(_CODE))
        except (RuntimeError, OSError, ValueError):  # the store's host has gone without a word
            return
        with self._lock:  # nothing of this rank's own end is cut off
            if code is not None and not self._own_end.is_set():
                with suppress(RuntimeError, OSError, ValueError):
                    _in_time(_PATIENCE, self._leave)
                flush()
                os._exit(code)

    def _leave(self, code: int | None = None) -> None:
        """Returns when all ranks are leaving; the main one when all others have seen that, and need no store. ``code``:
        this rank is the one that failed."""
        deadline = time.monotonic() + _PATIENCE
        if code is not None:
            self._store.set(_CODE, str(code))
        self._store.add(_LEAVING, 1)
        self._wait(_LEAVING, self._size, deadline)
        if self._main:
            self._wait(_GONE, self._size - 1, deadline)
        else:
            self._store.add(_GONE, 1)

    def _wait(self, key: str, count: int, deadline: float) -> None:
        while self._store.add(key, 0) + self._store.add(_DONE, 0) < count and time.monotonic() < deadline:
            time.sleep(0.02)


_company: _Company | None = None


def meet(store: Store, size: int, main: bool) -> None:
    """From now on the others, of ``size`` ranks, are told in ``store`` when this one fails. ``main``: this is the rank
    that hosts ``store``, if a rank does."""
    global _company
    _company = _Company(store, size, main)


def listen() -> None:
    """From now on, until :func:`part`, this process ends when another of the ranks fails."""
    if _company is not None:
        _company.listen()


def part() -> None:
    """This rank is done, and needs no other."""
    global _company
    if _company is not None:
        _company.part()
        _company = None


def _in_time(seconds: float, work: Callable[[], T]) -> T:
    """What ``work`` gives or raises; a TimeoutError after so many ``seconds``, while it goes on in a thread."""
    answer: Future[T] = Future()

    def do() -> None:
        try:
            answer.set_result(work())
        except Exception as error:
            answer.set_exception(error)

    try:
        threading.Thread(target=do, name="cocor-asking", daemon=True).start()
    except RuntimeError:  # no more threads can be started
        do()
    return answer.result(seconds)


def end(code: int) -> NoReturn:
    """End this process with exit code ``code``, once all has been done that is to be done at its exit."""
    with suppress(Exception):
        atexit._run_exitfuncs()
    _flush()
    os._exit(code)


def flush() -> None:
    """Write out what has been printed, if that takes no more than a moment."""
    with suppress(OSError):
        _in_time(_FLUSHING, _flush)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # a closed terminal, a full disk
            stream.flush()


def asked(work: Callable[[], T]) -> T:
    """What ``work`` gives or raises, which asks a store once; a TimeoutError if it does not answer."""
    return _in_time(_ANSWER, work)


def in_company() -> bool:
    """Whether there are others to tell."""
    return _company is not None


def alone() -> None:
    """This rank has failed and ends by itself, whatever the others do: it has yet to say why."""
    if _company is not None:
        _company.ignore()


def tell_others(code: int) -> None:
    """This rank is about to end with exit code ``code``, for what the others may not know of, and has said why."""
    if _company is not None:
        _company.tell(code)
