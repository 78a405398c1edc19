"""CPU cores of this process."""

import os


def available_cores() -> int:
    """Count the cores that this process may run on, as containers limit them."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
