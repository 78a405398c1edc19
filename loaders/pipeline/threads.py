"""Pool of daemon threads, which do not hold up the exit when stuck in a read.

Python joins the threads of its own ``ThreadPoolExecutor`` at exit, whatever they are doing.
"""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextlib import suppress
from functools import partial
from typing import Any, ParamSpec, TypeVar

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
_Task = tuple[Future[Any], Callable[[], Any]]


class DaemonPool(Executor):
    """Executor like ``ThreadPoolExecutor``, with ``threads`` daemons."""

    def __init__(self, threads: int, name: str) -> None:
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._closed = False
        self._threads: list[threading.Thread] = []
        try:
            for number in range(threads):
                thread = threading.Thread(target=_work, args=(self._tasks,), name=f"{name}_{number}", daemon=True)
                thread.start()
                self._threads.append(thread)
        except RuntimeError:  # no more threads
            self.shutdown()
            raise

    def submit(
        self, fn: Callable[Parameters, Result], /, *args: Parameters.args, **kwargs: Parameters.kwargs
    ) -> Future[Result]:
        if self._closed:
            raise RuntimeError("cannot submit to a pool that is shut down")
        future: Future[Result] = Future()
        self._tasks.put((future, partial(fn, *args, **kwargs)))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the threads after all tasks, or after the begun ones if ``cancel_futures``."""
        if not self._closed:
            self._closed = True
            with suppress(queue.Empty):
                while cancel_futures:
                    self._tasks.get_nowait()[0].cancel()  # type: ignore[index]  # None comes after the last
            for _ in self._threads:
                self._tasks.put(None)
        if wait:
            for thread in self._threads:
                thread.join()


def _work(tasks: "queue.SimpleQueue[_Task | None]") -> None:
    while (task := tasks.get()) is not None:
        future, work = task
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)
        del task, future, work  # keep no reference to the result while waiting for the next
