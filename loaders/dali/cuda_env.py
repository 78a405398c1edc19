"""CUDA's environment: how many hardware queues of a GPU it uses, 8 or 32.

DALI's dozens of streams would share 8 queues with the training step, whose kernels then wait behind copies and
decoding: on an H200 that takes 5 to 15 % of a step, with 32 queues 1.3 %.
"""

import logging
import os
from functools import cache

_VARIABLE, _ALL, _USUAL = "CUDA_DEVICE_MAX_CONNECTIONS", 32, 8
_log = logging.getLogger(__name__)


def use_all() -> None:
    """Have CUDA use all queues, unless the user has set a number. Call before it starts."""
    os.environ.setdefault(_VARIABLE, str(_ALL))


@cache
def advise() -> None:
    """Warn, once, a program that uses DALI without :func:`use_all`."""
    if os.environ.get(_VARIABLE, str(_USUAL)) in map(str, range(1, _ALL)):
        _log.warning(
            "DALI's streams share a GPU's queues with other work, which slows both down by 5 % and more: "
            f"set {_VARIABLE}={_ALL} before CUDA starts"
        )
