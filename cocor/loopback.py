"""Whether ranks of this machine can meet: PyTorch's launcher waits for minutes without a network, as in a sandbox whose
loopback interface is down, and for ever where it may not start a thread."""

import socket
import threading
from contextlib import closing

from loaders.errors import UserError

ADDRESS = "127.0.0.1"
_SECONDS = 5.0
_THREADS = 8  # a few more than the launcher starts before the ranks


def check() -> None:
    """Connect to a socket of this process's own, and start threads.

    Raises:
        UserError: there is no way to :data:`ADDRESS`.
        RuntimeError: no more threads can be started.
    """
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
