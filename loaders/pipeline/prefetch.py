"""Prefetching: one background thread, and a queue between generator and consumer.

The producer's exceptions appear in the consumer. Leaving the loop early, closing the loader, losing the last reference
and the end of the program all stop the thread, and the generator's ``finally`` clauses run in it.
"""

import queue
import threading
import weakref
from collections.abc import Generator, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Generic, TypeVar

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
    while thread.is_alive():  # it may be waiting for room in the queue
        with suppress(queue.Empty):
            ready.get(timeout=0.02)
    thread.join()
    with suppress(queue.Full):
        ready.put_nowait(_END)  # wakes a consumer in another thread
