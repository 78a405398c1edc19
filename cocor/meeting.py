"""Rendezvous: the ranks find each other in a store, and learn there of a rank that failed before all had met.

    met            the ranks of one start find each other, then join for collectives
    (:mod:`cocor.distributed.collectives`)
    fail_before    a rank that fails before that announces it in the store: nobody waits for it, and one rank prints why

torchrun's environment holds the store's address; srun's tasks agree on one (:mod:`cocor.distributed.slurm`).
"""

import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta

import torch.distributed as dist

from cocor import leaving, said
from cocor.distributed import failures, slurm
from cocor.distributed.env import Place, place, torchrun_hosts
from loaders.errors import UserError

# Long enough for one rank to write a checkpoint to slow storage while the others wait.
TIMEOUT = timedelta(minutes=10)
_PAUSE = 0.02  # seconds
_JOINING = 120.0  # seconds for ranks that have all started to join; it takes a moment, some seconds with many GPUs
_SILENT, _LONGER = timedelta(seconds=5), timedelta(seconds=40)  # for others to come: before and after the message
_FAILED, _SEEN = "cocor/failed", "cocor/failed/seen"  # keys of the store: exit code, how many ranks have read it
_AWAY = (RuntimeError, OSError, ValueError, KeyError)  # what a store raises whose host is not there

_has_met = False


@contextmanager
def met(here: Place) -> Iterator[dist.Store]:
    """Wait for all ranks of this start; gives a store that no other start uses. Within the block they are to join each
    other: if one of them fails meanwhile, the others end too; if one vanishes, they end after ``_JOINING`` seconds.

    Raises:
        SystemExit: another rank has failed, and printed why.
    """
    global _has_met
    with _rendezvous(here, TIMEOUT) as store:

        def answers(name: str) -> None:
            leaving.meet(dist.PrefixStore(name, store.clone()), here.size, here.rank == 0)

        name = attempt(store, here, answers)
        leaving.listen()
        _has_met = True
        watchdog = threading.Timer(_JOINING, _give_up_joining)
        watchdog.daemon = True
        watchdog.start()
        try:
            yield dist.PrefixStore(name, store)
        finally:
            watchdog.cancel()


def _give_up_joining() -> None:
    """End this process; called in a thread, since the main one is blocked inside a library."""
    failures.fail("a rank has ended, or stands still, since all ranks were there; they could not join each other", 1)
    leaving.tell_others(1)
    leaving.flush()
    os._exit(1)


@contextmanager
def _rendezvous(here: Place, timeout: timedelta) -> Iterator[dist.Store]:
    """The store at the address in the environment; srun's tasks, which have none there, agree on one."""
    if "MASTER_ADDR" not in os.environ:
        with slurm.meeting(here.rank == 0, timeout) as store:
            yield store
        return
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    hosts = here.rank == 0 and not torchrun_hosts()
    try:
        yield dist.TCPStore(address, port, is_master=hosts, timeout=timeout, wait_for_workers=False)
    except dist.DistNetworkError as error:
        if "EADDRINUSE" not in str(error):
            raise
        raise UserError(f"MASTER_PORT {port}: another program has taken it; set it to a port that is free") from None


def attempt(store: dist.Store, here: Place, answers: Callable[[str], None] = lambda name: None) -> str:
    """A name that the ranks of this start have in common, and no earlier start has. ``answers(name)`` is called before
    this rank confirms a name; more than once if a name turns out to be an earlier start's.

    When torchrun restarts ranks it may keep its store, with the addresses of the dead ranks in it (PyTorch issue
    135712), and its count of restarts differs between machines. So the main rank makes up a name and the others confirm
    it; a name that a process of the same rank has confirmed before belongs to an earlier start.
    """
    leader, deadline = "cocor/leader", time.monotonic() + TIMEOUT.total_seconds()
    late = TimeoutError(f"rank {here.rank} waited {TIMEOUT} for the other ranks to start")
    if here.rank == 0:
        name = uuid.uuid4().hex
        store.set(leader, name)
        others = [f"cocor/{name}/{rank}" for rank in range(1, here.size)]
        while time.monotonic() < deadline:
            if store.check(others):
                answers(name)
                store.set(f"cocor/{name}/complete", "")
                return name
            _leave_if_another_failed(store, here)
            time.sleep(_PAUSE)
        raise late
    refused = ""
    while time.monotonic() < deadline:
        _leave_if_another_failed(store, here)
        name = store.get(leader).decode() if store.check([leader]) else refused
        if name != refused:
            answers(name)
        if name != refused and store.add(f"cocor/{name}/{here.rank}", 1) == 1:
            while store.get(leader).decode() == name and time.monotonic() < deadline:
                if store.check([f"cocor/{name}/complete"]):
                    return name
                _leave_if_another_failed(store, here)
                time.sleep(_PAUSE)
        refused = name
        time.sleep(_PAUSE)
    raise late


def fail_before(message: str, code: int, tell: Callable[[], object]) -> None:
    """Announce that this rank fails before the ranks have met: all that arrive exit with ``code`` as well. ``tell``
    prints the message, unless another rank has printed the same."""
    here = place()
    if here is None or here.size == 1:
        tell()
        return
    printed = False
    with ExitStack() as stack:
        for patience in (_SILENT, _LONGER):
            store = None
            with suppress(UserError, *_AWAY):
                store = stack.enter_context(_rendezvous(here, patience))
                printed |= store.add(said.key(message), 1) > 1
            if not printed:
                tell()
            printed = True
            if store is not None:
                with suppress(*_AWAY):
                    store.set(_FAILED, str(code))
                    _wait_until_all_have_seen(store, here)
                return


def _leave_if_another_failed(store: dist.Store, here: Place) -> None:
    if store.check([_FAILED]):
        code = int(store.get(_FAILED))
        with suppress(*_AWAY):
            _wait_until_all_have_seen(store, here)
        leaving.part()
        raise SystemExit(code)


def _wait_until_all_have_seen(store: dist.Store, here: Place) -> None:
    """Wait until all ranks have seen that one has failed, if the store would end with this process or its torchrun."""
    deadline = time.monotonic() + _LONGER.total_seconds()
    if store.add(_SEEN, 1) == here.size:
        for key in (_FAILED, _SEEN):  # torchrun may keep its store for the next start
            store.delete_key(key)
    elif here.rank == 0 or torchrun_hosts():
        while store.check([_FAILED]) and time.monotonic() < deadline:
            time.sleep(_PAUSE)


def is_due() -> bool:
    """Whether other ranks are, or will be, waiting to meet this one, and no launcher ends them all."""
    here = place()
    if here is None or here.size == 1 or _has_met or leaving.in_company():
        return False
    return not (torchrun_hosts() and here.local_size == here.size)
