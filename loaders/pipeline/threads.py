"""Pool of daemon threads, which do not hold up the exit when stuck in a read.

Python joins the threads of its own ``ThreadPoolExecutor`` at exit, whatever they are doing.
"""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


@dataclass(frozen=True)
class _Task:
    future: Future[Any]
    work: Callable[[], Any]

    def __call__(self) -> None:
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            result = self.work()
        except BaseException as error:
            self.future.set_exception(error)
        else:
            self.future.set_result(result)


class DaemonPool(Executor):
    """Like ``ThreadPoolExecutor``, with ``threads`` daemons. As a context, waits for them."""

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
        self._tasks.put(_Task(future, lambda: fn(*args, **kwargs)))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the threads after all tasks, or after the begun ones if ``cancel_futures``."""
        if not self._closed:
            self._closed = True
            if cancel_futures:
                self._cancel()
            for _ in self._threads:
                self._tasks.put(None)
        if wait:
            for thread in self._threads:
                thread.join()

    def _cancel(self) -> None:
        while True:
            try:
                task = self._tasks.get_nowait()
            except queue.Empty:
                return
            if task is not None:
                task.future.cancel()


def _work(tasks: "queue.SimpleQueue[_Task | None]") -> None:
    while (task := tasks.get()) is not None:
        task()
        del task  # keep no reference to its result while waiting for the next
