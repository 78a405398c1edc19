"""CUDA's environment: how many hardware queues of a GPU it uses, 8 or 32.

With 8, DALI's dozens of streams hold up the kernels of the training step: by 5 to 15 % on an H200, with 32 by 1.3 %.
"""

import logging
import os
from functools import cache

_VARIABLE, _ALL, _USUAL = "CUDA_DEVICE_MAX_CONNECTIONS", 32, 8
_log = logging.getLogger(__name__)


def use_all() -> None:
    """Have CUDA, before it starts, use all queues, unless the user has set a number."""
    os.environ.setdefault(_VARIABLE, str(_ALL))


@cache
def advise() -> None:
    """Warn, once, a program that uses DALI without :func:`use_all`."""
    if os.environ.get(_VARIABLE, str(_USUAL)) in map(str, range(1, _ALL)):
        why = "DALI's streams share a GPU's queues with other work, which slows both down by 5 % and more"
        _log.warning(f"{why}: set {_VARIABLE}={_ALL} before CUDA starts")
