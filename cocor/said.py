"""One line for a mistake that all ranks make: the ranks count in their store how many have come to print a message."""

import hashlib
import os
from datetime import timedelta

import torch.distributed as dist

from cocor import leaving
from cocor.distributed.env import place, torchrun_hosts


def by_another(message: str) -> bool:
    """Whether another rank has printed ``message`` already, or is about to.

    Asks the store where the ranks have met or, if torchrun hosts it, will meet.
    """
    here = place()
    if here is None or here.size == 1:
        return False
    try:
        return leaving.asked(lambda: _store().add(key(message), 1)) > 1
    except TimeoutError:
        return False
    except (RuntimeError, ValueError, KeyError):  # no store yet, or its host, the main rank, has exited
        return here.rank > 0 and dist.is_initialized()


def _store() -> dist.Store:
    """The store where the ranks have met or, if torchrun hosts it, will meet. RuntimeError if there is none yet."""
    if dist.is_initialized():
        found: dist.Store = dist.distributed_c10d._get_default_store()
        return found
    if not torchrun_hosts():
        raise RuntimeError("no store before the ranks have met")
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return dist.TCPStore(*address, is_master=False, timeout=timedelta(seconds=5))


def key(message: str) -> str:
    """The store's key under which the ranks of this start count those that have come to print ``message``."""
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return f"cocor/told/{restart}/{hashlib.sha256(message.encode()).hexdigest()}"
