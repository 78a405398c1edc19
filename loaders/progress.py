"""Progress of long loops: a bar on a terminal, now and then a plain line elsewhere (log files, batch jobs)."""

import sys
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

from tqdm import tqdm

Item = TypeVar("Item")

_FIRST_LINE_S, _LINE_EVERY_S = 5.0, 30.0


def track(items: Iterable[Item], total: int, text: str, unit: str = "files", step: int = 1) -> Iterator[Item]:
    """Yield ``items``, each of which stands for ``step`` of ``total`` units; quiet when done within seconds."""
    if sys.stderr.isatty():
        with tqdm(total=total, desc=text, unit=f" {unit}", delay=1.0, leave=False) as bar:
            for item in items:
                yield item
                bar.update(min(step, total - bar.n))
        return
    start = time.monotonic()
    due, done = start + _FIRST_LINE_S, 0
    for item in items:
        yield item
        done = min(done + step, total)
        now = time.monotonic()
        if now >= due and done < total:
            left = (now - start) * (total - done) / done
            print(f"{text}: {done:,} of {total:,} {unit}, about {left:.0f} s left", file=sys.stderr, flush=True)
            due = now + _LINE_EVERY_S
