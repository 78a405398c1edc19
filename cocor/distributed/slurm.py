"""Rendezvous of the tasks of a Slurm job step, which get no address: on the first node, at a port that is free there.

    main rank   hosts the store at any free port; at the first free one of a few ports derived from the job's number it
                answers every connection with the job's number and the store's port
    the others  connect to these ports in turn until one answers for their job

So a port that another program or job has taken does no harm. PyTorch's own client must not connect to an unknown port:
it would wait for ever on a program that listens but never answers.
"""

import os
import re
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch.distributed as dist

from loaders.errors import UserError

_FIRST, _RANGE, _PORTS, _STRIDE = 20000, 12000, 8, 1499
_ANSWER = 2.0  # seconds that an answer may take
_PAUSE = 0.1  # seconds between two rounds of all ports
_MOST = 100  # bytes of an answer


@contextmanager
def meeting(main: bool, timeout: timedelta) -> Iterator[dist.Store]:
    """The store of this job step; its other tasks can find it while the block lasts.

    Raises:
        UserError: no port is left on the first node, or its main rank did not answer in time.
    """
    ports, job = _ports(), f"cocor {os.environ.get('SLURM_JOB_ID', 0)}.{os.environ.get('SLURM_STEP_ID', 0)}"
    nodes = os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_JOB_NODELIST", "localhost")
    host = first_host(nodes)
    if not main:
        port = _find(host, ports, job, timeout)
        yield dist.TCPStore(host, port, is_master=False, timeout=timeout, wait_for_workers=False)
        return
    with _listener(ports) as listener:
        store = dist.TCPStore(host, 0, is_master=True, timeout=timeout, wait_for_workers=False)
        answer = f"{job} {store.port}\n".encode()
        threading.Thread(target=_tell, args=(listener, answer), daemon=True).start()
        try:
            yield store
        finally:
            listener.shutdown(socket.SHUT_RDWR)  # wakes the thread, which would keep the port


def first_host(nodes: str) -> str:
    """The first of Slurm's node list: ``gpu[03-05,9],x`` gives ``gpu03``."""
    head = re.match(r"([^,\[]*)(?:\[(\d+)[^\]]*\]([^,]*))?", nodes)
    assert head is not None  # the pattern matches any text
    return "".join(part or "" for part in head.groups())


def _ports() -> list[int]:
    if "MASTER_PORT" in os.environ:
        return [int(os.environ["MASTER_PORT"])]
    job, step = int(os.environ.get("SLURM_JOB_ID", 0)), int(os.environ.get("SLURM_STEP_ID", 0))
    return [_FIRST + (job * 7 + step + _STRIDE * at) % _RANGE for at in range(_PORTS)]


def _listener(ports: Sequence[int]) -> socket.socket:
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    for port in ports:
        with suppress(OSError):
            return socket.create_server(("", port), family=family, backlog=1024, dualstack_ipv6=both)
    tried = ", ".join(map(str, ports))
    raise UserError(f"no free port for the ranks to meet among {tried}; set MASTER_PORT to one that is free")


def _tell(listener: socket.socket, answer: bytes) -> None:
    """Send ``answer`` to whoever connects, until ``listener`` is closed."""
    with suppress(OSError):
        while True:
            connection, _ = listener.accept()
            with suppress(OSError), connection:
                connection.sendall(answer)


def _find(host: str, ports: Sequence[int], job: str, timeout: timedelta) -> int:
    """The port of the main rank's store."""
    deadline = time.monotonic() + timeout.total_seconds()
    while time.monotonic() < deadline:
        for port in ports:
            found = re.fullmatch(rf"{re.escape(job)} (\d+)\n", _ask(host, port))
            if found is not None:
                return int(found[1])
        time.sleep(_PAUSE)
    tried = ", ".join(map(str, ports))
    raise UserError(f"the main rank did not answer on {host} at port {tried} for {timeout}; did it start?")


def _ask(host: str, port: int) -> str:
    """The line that is answered at ``port``, or nothing if none comes in time."""
    with suppress(OSError), socket.create_connection((host, port), timeout=_ANSWER) as stream:
        line = b""
        while len(line) < _MOST and not line.endswith(b"\n"):
            part = stream.recv(_MOST)
            if not part:
                break
            line += part
        return line.decode(errors="replace")
    return ""
