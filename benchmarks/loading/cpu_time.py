"""CPU time of this process and its descendants, at known moments.

A reading takes time, in which the CPU works on: over a wall-clock time taken elsewhere, CPU time could add up to more
cores than there are. So a reading has its own moment, the middle of it.
"""

import os
import resource
import time
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Reading:
    """CPU seconds, user and system, used up to a moment of :func:`time.perf_counter`."""

    moment: float
    used: float

    def cores_since(self, earlier: "Reading") -> float:
        """Average the number of busy cores since ``earlier``."""
        return (self.used - earlier.used) / (self.moment - earlier.moment)


def read() -> Reading:
    """Take a reading. Without /proc, children count only once they have ended."""
    family = _descendants()
    before = time.perf_counter()
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)  # those that were waited for
    used = time.process_time() + ended.ru_utime + ended.ru_stime + sum(map(_used, family))
    return Reading((before + time.perf_counter()) / 2, used)


def _used(process: int) -> float:
    """Read CPU seconds of a process and its awaited children; 0 once it has ended."""
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
    """Read fields of /proc/PID/stat from the state on; none if the process has ended."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
