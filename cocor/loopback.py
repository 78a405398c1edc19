"""Whether ranks of this machine can meet: PyTorch's launcher waits for minutes without a network, as in a sandbox whose
loopback interface is down, and for ever where it may not start a thread or open a socket."""

import os
import socket
import threading
from contextlib import ExitStack, closing

from loaders.errors import UserError

ADDRESS = "127.0.0.1"
_SECONDS = 5.0
_THREADS, _HANDLES = 8, 24  # about what the launcher needs before the ranks start


def check() -> None:
    """Open some files, connect to a socket of this process's own, and start threads.

    Raises:
        UserError: there is no way to :data:`ADDRESS`.
        OSError: no more files can be opened.
        RuntimeError: no more threads can be started.
    """
    with ExitStack() as handles:
        for _ in range(_HANDLES):
            handles.enter_context(open(os.devnull))  # noqa: PTH123
    try:
        with closing(socket.create_server((ADDRESS, 0))) as server:
            socket.create_connection(server.getsockname(), _SECONDS).close()
    except OSError as error:
        way = f"ranks of one machine meet at {ADDRESS}, which cannot be reached: {error.strerror or error}"
        raise UserError(f"{way}; bring the loopback interface up (ip link set lo up), or use one rank") from None
    over = threading.Event()
    try:
        for _ in range(_THREADS):
            threading.Thread(target=over.wait, daemon=True).start()
    finally:
        over.set()
