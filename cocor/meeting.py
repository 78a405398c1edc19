"""Where the ranks meet, and what they tell each other there: who has started, who has failed.

    met            the ranks of one start find each other, and join for collectives (:mod:`cocor.distributed`)
    fail_before    a rank that fails before comes as well, lest the others wait for it, and for its message to be one

torchrun's environment says where; srun's tasks agree on an address (:mod:`cocor.slurm`).
"""

import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta

import torch.distributed as dist

from cocor import failures, leaving, said, slurm
from cocor.place import Place, place, torchrun_hosts
from loaders.errors import UserError

# Long enough for one rank to write a checkpoint to slow storage while the others wait.
TIMEOUT = timedelta(minutes=10)
_PAUSE = 0.02  # seconds
_JOINING = 120.0  # seconds that ranks which are all there may take to join: a moment, with many GPUs some seconds
_SILENT, _LONGER = timedelta(seconds=5), timedelta(seconds=40)  # that a rank which has failed waits for others to come
_FAILED, _SEEN = "cocor/failed", "cocor/failed/seen"  # keys of the store
_AWAY = (RuntimeError, OSError, ValueError, KeyError)  # what a store raises that is not there

_has_met = False


@contextmanager
def met(here: Place) -> Iterator[dist.Store]:
    """A store of the ranks of this start alone; all of them are there. Within they join each other: where one of them
    ends meanwhile the others do as well, and where one vanishes without a word they do not wait for it for long.

    Raises:
        SystemExit: another rank has failed, and said why.
    """
    global _has_met
    with _place_to_meet(here, TIMEOUT) as store:

        def answers(name: str) -> None:
            leaving.meet(dist.PrefixStore(name, store.clone()), here.size, here.rank == 0)

        name = attempt(store, here, answers)
        leaving.listen()
        _has_met = True
        patience = threading.Timer(_JOINING, _give_up_joining)
        patience.daemon = True
        patience.start()
        try:
            yield dist.PrefixStore(name, store)
        finally:
            patience.cancel()


def _give_up_joining() -> None:
    """In a thread: the main one is within a library."""
    failures.fail("a rank has ended, or stands still, since all ranks were there; they could not join each other", 1)
    leaving.tell_others(1)
    leaving.flush()
    os._exit(1)


@contextmanager
def _place_to_meet(here: Place, timeout: timedelta) -> Iterator[dist.Store]:
    """The store at the address in the environment; srun's tasks, which have none, agree on one."""
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
    """A name that the ranks of this start, and of no earlier one, have in common. ``answers(name)`` is called before
    this rank lets others go on by that name, which may yet turn out to be an old one.

    When torchrun restarts ranks it may keep its store, with the addresses of the dead ranks in it (PyTorch issue
    135712), and how often it has restarted is not the same on all machines. So the main rank makes a name up and the
    others report to it; a name that a rank of the same number has answered to before is an old one.
    """
    leader, patience = "cocor/leader", time.monotonic() + TIMEOUT.total_seconds()
    late = TimeoutError(f"rank {here.rank} waited {TIMEOUT} for the other ranks to start")
    if here.rank == 0:
        name = uuid.uuid4().hex
        store.set(leader, name)
        others = [f"cocor/{name}/{rank}" for rank in range(1, here.size)]
        while time.monotonic() < patience:
            if store.check(others):
                answers(name)
                store.set(f"cocor/{name}/complete", "")
                return name
            _leave_if_another_failed(store, here)
            time.sleep(_PAUSE)
        raise late
    refused = ""
    while time.monotonic() < patience:
        _leave_if_another_failed(store, here)
        name = store.get(leader).decode() if store.check([leader]) else refused
        if name != refused:
            answers(name)
        if name != refused and store.add(f"cocor/{name}/{here.rank}", 1) == 1:
            while store.get(leader).decode() == name and time.monotonic() < patience:
                if store.check([f"cocor/{name}/complete"]):
                    return name
                _leave_if_another_failed(store, here)
                time.sleep(_PAUSE)
        refused = name
        time.sleep(_PAUSE)
    raise late


def fail_before(message: str, code: int, tell: Callable[[], object]) -> None:
    """This rank fails before the ranks have met: all that come to meet end with ``code`` as well. ``tell`` says why,
    unless another rank has said the same."""
    here = place()
    if here is None or here.size == 1:
        tell()
        return
    told = False
    with ExitStack() as stack:
        for patience in (_SILENT, _LONGER):
            store = None
            with suppress(UserError, *_AWAY):
                store = stack.enter_context(_place_to_meet(here, patience))
                told |= store.add(said.key(message), 1) > 1
            if not told:
                tell()
            told = True
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
    """That a rank has failed. Those may go that neither host the store nor take it with them."""
    deadline = time.monotonic() + _LONGER.total_seconds()
    if store.add(_SEEN, 1) == here.size:
        for key in (_FAILED, _SEEN):  # torchrun may keep its store for the next start
            store.delete_key(key)
    elif here.rank == 0 or torchrun_hosts():
        while store.check([_FAILED]) and time.monotonic() < deadline:
            time.sleep(_PAUSE)


def is_due() -> bool:
    """Whether other ranks wait, or will, for this one to come, and no launcher ends them all."""
    here = place()
    if here is None or here.size == 1 or _has_met or leaving.in_company():
        return False
    return not (torchrun_hosts() and here.local_size == here.size)
