"""Work ahead in one background thread: a bounded queue between a generator and the loop that consumes it.

The producer's exceptions appear in the consumer. Leaving the loop early, closing the loader, losing the last reference
and the end of the program all stop the thread, and the generator's ``finally`` clauses run in it.

They wait for the thread to end, but no longer than ``PATIENCE`` seconds: a disk that does not answer must delay neither
an error message nor the exit of the process. The thread is then abandoned. It is a daemon, as must be all threads that
the generator waits for; should the disk answer after all, the thread and the generator end as usual.
"""

import logging
import queue
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, suppress
from typing import Generic, TypeVar

PATIENCE = 10.0
"""Seconds: more than a batch takes, less than schedulers grant a run that must stop
(:mod:`cocor.distributed.signals`)."""

_log = logging.getLogger(__name__)
Item = TypeVar("Item")


class _Raised:
    def __init__(self, error: BaseException) -> None:
        self.error = error


_END = object()


def _warn() -> None:
    _log.warning(f"gave up waiting for data after {PATIENCE:.0f} s")


class Prefetch(Generic[Item]):
    """Iterates ``source`` in a thread that works up to ``depth`` items ahead. A context manager. ``given_up`` is called
    if the thread does not end in time."""

    def __init__(
        self, source: Generator[Item, None, None], depth: int = 2, given_up: Callable[[], None] = _warn
    ) -> None:
        self._ready: queue.Queue[object] = queue.Queue(depth)
        self._stop = threading.Event()
        # The thread must not refer to this object, or it would never be collected.
        self._thread = threading.Thread(
            target=_produce, args=(source, self._ready, self._stop), name="cocor-prefetch", daemon=True
        )
        self._thread.start()  # before there is something that waits for its end: it may be one thread too many
        self._finalizer = weakref.finalize(self, _shut_down, self._ready, self._stop, self._thread, given_up)

    def __iter__(self) -> Iterator[Item]:
        return self

    def __next__(self) -> Item:
        if not self._finalizer.alive:
            raise StopIteration
        item = self._ready.get()
        if item is _END or isinstance(item, _Raised):
            self.close()
            if isinstance(item, _Raised):
                raise item.error
            raise StopIteration
        return item  # type: ignore[return-value]

    def close(self) -> None:
        """Stop the thread and wait for it. Calling it twice is allowed."""
        self._finalizer()

    def __enter__(self) -> "Prefetch[Item]":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class InConsumer(Generic[Item]):
    """Iterates ``source`` in the consumer's thread. Only closing it early, which may block on a disk, runs in another
    thread, for which :meth:`close` waits at most ``PATIENCE`` seconds; exceptions raised there appear in the caller.

    ``prepare`` is called first in that other thread, and ``given_up`` if it does not end in time.
    """

    def __init__(
        self, source: Generator[Item, None, None], prepare: Callable[[], None], given_up: Callable[[], None] = _warn
    ) -> None:
        self._source, self._prepare, self._given_up = source, prepare, given_up
        self._ended = False

    def __iter__(self) -> Iterator[Item]:
        return self

    def __next__(self) -> Item:
        if self._ended:
            raise StopIteration
        try:
            return next(self._source)
        except BaseException:
            self._ended = True
            raise

    def close(self) -> None:
        """End ``source``. Calling it twice is allowed."""
        if self._ended:
            return
        self._ended = True
        raised: list[BaseException] = []
        thread = threading.Thread(
            target=_end, args=(self._source, self._prepare, raised), name="cocor-end", daemon=True
        )  # fmt: skip
        thread.start()
        thread.join(PATIENCE)
        if thread.is_alive():
            self._given_up()
        for error in raised:
            raise error


def _end(source: Generator[object, None, None], prepare: Callable[[], None], raised: list[BaseException]) -> None:
    try:
        prepare()
        source.close()
    except BaseException as error:
        raised.append(error)


def _produce(source: Generator[object, None, None], ready: "queue.Queue[object]", stop: threading.Event) -> None:
    last: object = _END
    try:
        with closing(source):
            for item in source:
                if not stop.is_set():
                    ready.put(item)
                del item  # the consumer alone keeps a batch alive
                if stop.is_set():
                    return
    except BaseException as error:
        last = _Raised(error)
    finally:
        if not stop.is_set():
            ready.put(last)


def _shut_down(
    ready: "queue.Queue[object]", stop: threading.Event, thread: threading.Thread, given_up: Callable[[], None]
) -> None:
    stop.set()
    if thread is threading.current_thread():  # the garbage collector may run in any thread; this one ends by itself
        return
    deadline = time.monotonic() + PATIENCE
    while thread.is_alive():  # it may be waiting for room in the queue
        with suppress(queue.Empty):
            ready.get(timeout=0.02)
        if time.monotonic() > deadline:
            given_up()
            break
    else:
        thread.join()
    with suppress(queue.Full):
        ready.put_nowait(_END)  # wakes a consumer in another thread
