"""The CPU time of a process and all its descendants, each reading with the moment for which it holds.

Reading takes time, tens of milliseconds where Python threads compete for the interpreter's lock, and meanwhile the CPU
goes on: divided by the time from batch to batch, it would add up to more cores than there are. So processes are looked
for first, then read at one go, again if that took long, and busy cores are the CPU time between two readings over the
time between the same two.
"""

import os
import resource
import time
from dataclasses import dataclass
from pathlib import Path

_TRIES, _SHORT = 20, 0.001  # seconds


@dataclass(frozen=True)
class Reading:
    """CPU seconds, user and system, used up to a moment of :func:`time.perf_counter`."""

    moment: float
    used: float

    def cores_since(self, earlier: "Reading") -> float:
        """Cores that were busy since, on average."""
        return (self.used - earlier.used) / (self.moment - earlier.moment)


def read() -> Reading:
    """Now. On a system without /proc, children count once they have ended."""
    family = _descendants()
    shortest, reading = float("inf"), Reading(0.0, 0.0)
    for _ in range(_TRIES):
        before = time.perf_counter()
        used = _own() + sum(map(_used, family))
        took = time.perf_counter() - before
        if took < shortest:
            shortest, reading = took, Reading(before + took / 2, used)
        if took < _SHORT:
            break
    return reading


def _own() -> float:
    """Of this process, and of the children that it has waited for."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + ended.ru_utime + ended.ru_stime


def _used(process: int) -> float:
    """Of a process, and of the children that it has waited for; 0 once it has ended, when its parent's include it."""
    return sum(map(int, _fields(process)[11:15])) / os.sysconf("SC_CLK_TCK")


def _descendants() -> list[int]:
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        for parent in _fields(int(folder.name))[1:2]:
            children.setdefault(int(parent), []).append(int(folder.name))
    found = children.get(os.getpid(), [])
    for process in found:  # which grows
        found += children.get(process, [])
    return found


def _fields(process: int) -> list[str]:
    """Of the kernel's line about it, from its state on; none if it has ended."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
