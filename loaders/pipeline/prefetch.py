"""Prefetching: one background thread, and a queue between generator and consumer.

The producer's exceptions appear in the consumer. Leaving the loop early, closing the loader, losing the last reference
and the end of the program all stop the thread, and the generator's ``finally`` clauses run in it.

They wait for the thread to end, but no longer than ``PATIENCE`` seconds: a disk that does not answer must not hold up
the process for ever. The thread is then left behind. It is a daemon, as must be all threads that the generator waits
for.
"""

import logging
import queue
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import wait
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Generic, TypeVar

from loaders.pipeline.threads import DaemonPool

PATIENCE = 10.0
"""Seconds: more than a batch takes, less than schedulers grant a run that must stop."""

_log = logging.getLogger(__name__)
Item = TypeVar("Item")


@dataclass
class _Raised:
    error: BaseException


_END = object()


class Prefetch(Generic[Item]):
    """Iterate ``source`` in a thread, up to ``depth`` items ahead. A context manager."""

    def __init__(self, source: Generator[Item, None, None], depth: int = 2) -> None:
        self._ready: queue.Queue[object] = queue.Queue(depth)
        self._stop = threading.Event()
        # The thread must not refer to this object, or it would never be collected.
        self._thread = threading.Thread(
            target=_produce, args=(source, self._ready, self._stop), name="cocor-prefetch", daemon=True
        )
        self._thread.start()  # before there is something that waits for its end: it may be one thread too many
        self._finalizer = weakref.finalize(self, _shut_down, self._ready, self._stop, self._thread)

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
    """Iterate ``source`` in the consumer's thread, but end it early in another.

    That thread begins with ``prepare``; what it raises appears in the caller of :meth:`close`.
    """

    def __init__(self, source: Generator[Item, None, None], prepare: Callable[[], None]) -> None:
        self._source, self._prepare = source, prepare
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
        pool = DaemonPool(1, "cocor-end")
        ending = pool.submit(self._end)
        pool.shutdown(wait=False)
        if wait([ending], PATIENCE).done:
            pool.shutdown()
            ending.result()
        else:
            _give_up()

    def _end(self) -> None:
        self._prepare()
        self._source.close()


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


def _shut_down(ready: "queue.Queue[object]", stop: threading.Event, thread: threading.Thread) -> None:
    stop.set()
    if thread is threading.current_thread():  # the garbage collector may run in any thread; this one ends by itself
        return
    deadline = time.monotonic() + PATIENCE
    while thread.is_alive():  # it may be waiting for room in the queue
        with suppress(queue.Empty):
            ready.get(timeout=0.02)
        if time.monotonic() > deadline:
            _give_up()
            break
    else:
        thread.join()
    with suppress(queue.Full):
        ready.put_nowait(_END)  # wakes a consumer in another thread


def _give_up() -> None:
    _log.warning(f"the disk with the data does not answer: gave up after {PATIENCE:.0f} s")
