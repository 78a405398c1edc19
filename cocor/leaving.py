"""Ranks end together: when one exits because of a failure that it alone has seen, the others do not wait for ever.

Say the disk is full when the main rank writes a checkpoint, or one rank cannot read an image: the others are, or will
soon be, in a collective that never completes. torchrun ends them after a while, srun does not, and those that notice
print a traceback about a lost peer. So the failing rank announces its exit code in the store where the ranks have met,
and a thread on each of the others, which polls that store, ends its process with the same exit code and no message:

    failing rank    :func:`alone` -> prints its message -> :func:`tell_others` -> waits until all others know -> exits
    other ranks     since :func:`listen`: see the announcement -> wait until all ranks have seen it -> exit

A rank that a signal ends at once announces that too, as the others may not have received the signal. A rank can
announce its end as soon as it has reported its presence (:func:`meet`), because the others may wait for it from then
on; it listens once all are present. A store whose host is stopped or unreachable might not answer for hours, so that no
question to it is waited for without a limit.

All processes exit through :func:`end`. The interpreter's own shutdown would destroy the process group while the peers'
connections break, and run into library threads that want the GIL back: some ranks would abort with SIGABRT's exit code.
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
_PATIENCE = 5.0  # seconds to wait until all ranks know; one that is stopped or unreachable never will
_ANSWER = 2.0  # seconds for a store to answer
_FLUSHING = 1.0  # seconds for a terminal or a pipe to take what was printed
_CODE, _LEAVING, _GONE, _DONE = "cocor/exit code", "cocor/leaving", "cocor/gone", "cocor/done"  # keys of the store

T = TypeVar("T")


class Store(Protocol):
    """The part of ``torch.distributed.Store`` that is used here: launchers load this module, but not PyTorch."""

    def check(self, keys: list[str]) -> bool: ...

    def get(self, key: str) -> bytes: ...

    def set(self, key: str, value: str) -> None: ...

    def add(self, key: str, amount: int) -> int: ...


class _Company:
    """The ``size`` ranks that meet in ``store``. ``main``: this rank may host the store, so it leaves last."""

    def __init__(self, store: Store, size: int, main: bool) -> None:
        self._store, self._size, self._main = store, size, main
        self._own_end, self._told = threading.Event(), False
        self._lock = threading.RLock()  # a signal may end this rank while it is ending
        self._watcher: threading.Thread | None = None

    def listen(self) -> None:
        """End this process, from now on, when another rank announces its end."""
        self._watcher = threading.Thread(target=self._watch, name="cocor-leaving", daemon=True)
        self._watcher.start()
        atexit.register(self.close)  # a thread within the store's C++ when Python ends would abort the process

    def ignore(self) -> None:
        """No longer end this process when another rank does: it ends by itself."""
        with self._lock:
            self._own_end.set()

    def tell(self, code: int) -> None:
        """Announce that this rank exits with ``code``; returns when all others are leaving too, or do not answer."""
        self.ignore()
        if self._told:  # a signal has interrupted the rest of the first call
            return
        self._told = True
        with suppress(RuntimeError, OSError, ValueError):  # the store's host has left before, or does not answer
            _in_time(_PATIENCE, lambda: self._leave(code))

    def part(self) -> None:
        """Report that this rank is done: others that fail later need not wait for it."""
        with suppress(RuntimeError, OSError, ValueError):
            asked(lambda: self._store.add(_DONE, 1))
        self.close()

    def close(self) -> None:
        """Stop listening, before this process ends."""
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
        except (RuntimeError, OSError, ValueError):  # the store's host has vanished
            return
        with self._lock:  # lest this cuts off an end of this rank's own
            if code is not None and not self._own_end.is_set():
                with suppress(RuntimeError, OSError, ValueError):
                    _in_time(_PATIENCE, self._leave)
                flush()
                os._exit(code)

    def _leave(self, code: int | None = None) -> None:
        """Count this rank as leaving; returns when all ranks are, the main one when no other needs the store any more.
        ``code``: announce it first, as the rank that failed."""
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
    """Announce in ``store``, from now on, when this one of ``size`` ranks fails. ``main``: this is the rank that hosts
    ``store``, if a rank does."""
    global _company
    _company = _Company(store, size, main)


def listen() -> None:
    """End this process, from now on until :func:`part`, when another of the ranks fails."""
    if _company is not None:
        _company.listen()


def part() -> None:
    """Report that this rank is done and needs no other: failures elsewhere no longer end it."""
    global _company
    if _company is not None:
        _company.part()
        _company = None


def _in_time(seconds: float, work: Callable[[], T]) -> T:
    """The result of ``work``, or what it raises; a TimeoutError after ``seconds``, while it goes on in its thread."""
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
    """Run the functions registered with ``atexit``, then end this process with exit code ``code``."""
    with suppress(Exception):
        atexit._run_exitfuncs()
    _flush()
    os._exit(code)


def flush() -> None:
    """Flush the standard streams, for no longer than a moment."""
    with suppress(OSError):
        _in_time(_FLUSHING, _flush)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # a closed terminal, a full disk
            stream.flush()


def asked(work: Callable[[], T]) -> T:
    """The result of ``work``, a single question to a store; a TimeoutError if the store does not answer."""
    return _in_time(_ANSWER, work)


def in_company() -> bool:
    """Whether there are other ranks that :func:`tell_others` would tell."""
    return _company is not None


def alone() -> None:
    """Call this first when this rank fails: its message is then not cut off by the end of another rank."""
    if _company is not None:
        _company.ignore()


def tell_others(code: int) -> None:
    """Call this last when this rank fails, after its message: the others end as well, with the same exit ``code``."""
    if _company is not None:
        _company.tell(code)
