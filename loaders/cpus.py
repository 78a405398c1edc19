"""CPU cores of this process."""

import os


def available_cores() -> int:
    """Count the cores that this process may run on, which a container or ``taskset`` may have limited."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
