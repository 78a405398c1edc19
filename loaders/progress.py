"""Progress of long loops: a bar on a terminal, now and then a line elsewhere."""

import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from tqdm import tqdm

Item = TypeVar("Item")

_FIRST_LINE_S, _LINE_EVERY_S = 5.0, 30.0


def track(
    items: Iterable[Item], total: int, text: str, unit: str = "files", step: int = 1, *, even: bool = True
) -> Iterator[Item]:
    """Yield ``items``, and show how far that is unless it is done within seconds.

    Each stands for ``step`` of ``total`` units. ``even``: they take equally long, so that the time left is estimated.
    """
    if sys.stderr.isatty():
        with tqdm(total=total, desc=text, unit=f" {unit}", delay=1.0, leave=False) as bar:
            for item in items:
                yield item
                bar.update(min(step, total - bar.n))
        return
    start = time.monotonic()
    due, done = start + _FIRST_LINE_S, 0
    first: tuple[int, float] | None = None  # the first item's time includes the start of processes and threads
    for item in items:
        yield item
        done, now = min(done + step, total), time.monotonic()
        if now >= due and done < total:
            left = _left(first, done, now, total) if even else ""
            print(f"{text}: {done:,} of {total:,} {unit}{left}", file=sys.stderr, flush=True)
            due = now + _LINE_EVERY_S
        first = first or (done, now)


def _left(first: tuple[int, float] | None, done: int, now: float, total: int) -> str:
    """Estimate the time left by the pace since ``first`` = (how many, when)."""
    if first is None or done == first[0]:
        return ""
    return f", about {(now - first[1]) * (total - done) / (done - first[0]):.0f} s left"


class Pulse:
    """Print a line now and then about one item that may take minutes by itself."""

    def __init__(self) -> None:
        self._due = time.monotonic() + _LINE_EVERY_S

    def beat(self, text: str) -> None:
        """Print ``text``, if the last line is half a minute old."""
        now = time.monotonic()
        if now >= self._due:
            tqdm.write(text, file=sys.stderr)  # above a bar, if there is one
            sys.stderr.flush()
            self._due = now + _LINE_EVERY_S


@contextmanager
def patience(text: str, first: float | None = None) -> Iterator[None]:
    """Print ``text`` and the elapsed seconds every 30 s, or first after ``first``, while the block runs."""
    began, over = time.monotonic(), threading.Event()

    def say() -> None:
        wait = first or _LINE_EVERY_S
        while not over.wait(wait):
            print(f"{text}: {time.monotonic() - began:.0f} s so far", file=sys.stderr, flush=True)
            wait = _LINE_EVERY_S

    thread = threading.Thread(target=say, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
