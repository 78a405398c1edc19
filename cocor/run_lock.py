"""One process at a time writes to a run's folder: the main rank holds a lock on its log.txt.

A command that is started again while the old one is still dying, as schedulers do, waits for it. The system frees the
lock with the process, however that ends; a file system without locks does not stop the run.
"""

import errno
import fcntl
import logging
import os
import time
from contextlib import suppress
from pathlib import Path

from loaders.errors import UserError

FILE = "log.txt"
_PATIENCE = 30.0  # seconds
_log = logging.getLogger(__name__)
_held: set[int] = set()  # file descriptors


class RunLock:
    """The lock on the run in ``folder``, which need not exist yet."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._path = folder, folder / FILE
        self._handle: int | None = None

    def take(self, *, make: bool) -> None:
        """Wait for the lock and hold it. ``make`` the file if there is none, for which the folder must exist; without
        ``make`` do nothing then.

        Raises:
            UserError: another process still holds it after half a minute.
        """
        while not self.held:  # also where another process has removed the file that this one was waiting for
            try:
                handle = os.open(self._path, os.O_RDWR | (os.O_CREAT if make else 0), 0o666)
            except OSError:
                return  # no run there, or a folder that cannot be written, which run_folder reports
            _held.add(handle)
            self.release()
            self._handle = handle
            self._wait(handle)

    def release(self) -> None:
        """Release the lock, if it is held."""
        if self._handle is not None:
            _held.discard(self._handle)
            os.close(self._handle)
            self._handle = None

    @property
    def held(self) -> bool:
        """Whether this holds the lock on the file that is at the path now; another process may have replaced it."""
        with suppress(OSError):
            return self._handle is not None and os.path.samestat(os.fstat(self._handle), self._path.stat())
        return False

    def _wait(self, handle: int) -> None:
        warned, start = False, time.monotonic()
        while True:
            try:
                return fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                    return None  # no locks on this file system
            waited = time.monotonic() - start
            if waited > _PATIENCE:
                raise UserError(f"--output {self._folder} is written to by another process; stop it or choose another")
            if waited > 1 and not warned:
                _log.warning(f"waiting for another process that still uses {self._folder}")
                warned = True
            time.sleep(0.1)


def _close_in_child() -> None:
    """A forked data worker shares the lock, and would hold it beyond the end of the run."""
    for handle in _held:
        os.close(handle)
    _held.clear()


os.register_at_fork(after_in_child=_close_in_child)
