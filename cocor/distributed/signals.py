"""Stop on request: a signal sets a flag that the training loop reads every step.

    SIGTERM, SIGHUP   from schedulers, ``kill``, a closed terminal    exit code 75: the same command goes on from here
    SIGUSR1           Slurm's warning before the time limit           exit code 75
    SIGINT            Ctrl-C                                          exit code 130: a loop in the shell ends as well

Before the first step there is nothing to save, and the first signal ends the process at once with the same code. A
second signal always does, with 128 plus its number.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType

STOPPED = 75  # EX_TEMPFAIL of sysexits.h
INTERRUPTED = 130
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)

# Schedulers often signal a launcher and its ranks, so that a rank gets the same request twice.
_ECHO_SECONDS = 0.5


class Ended(Exception):
    """A command ends with this message and exit ``code``."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


class Stopped(Ended):
    """A signal has asked the run to stop, and it has done so."""

    def __init__(self, signum: int, position: str = "before a step was made", where: str = "there") -> None:
        name = signal.Signals(signum).name
        message = f"stopped by {name} {position}; the same command with --resume goes on from {where}"
        super().__init__(message, INTERRUPTED if signum == signal.SIGINT else STOPPED)


@dataclass
class _State:
    report: Callable[[str, int], object] = lambda message, code: None
    deferred: bool = False  # since defer()
    signum: int = 0  # the first signal
    since: float = 0.0  # when it came


_state = _State()


def requested() -> int:
    """Return the number of the signal that asked this process to stop, or 0."""
    return _state.signum


def defer() -> None:
    """Only note the first signal from now on, for :func:`requested`."""
    _state.deferred = True


@contextmanager
def handled(report: Callable[[str, int], object]) -> Iterator[None]:
    """Handle ``SIGNALS`` within the block, except ignored ones (nohup).

    ``report(message, exit code)`` is called before a signal ends the process. No effect outside the main thread.
    """
    global _state
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    outer, handlers = _state, {number: signal.getsignal(number) for number in SIGNALS}
    _state = _State(report)
    for number, handler in handlers.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, _receive)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        _state = outer


def _receive(number: int, frame: FrameType | None) -> None:
    now = time.monotonic()
    if not _state.signum:
        _state.signum, _state.since = number, now
        if _state.deferred:
            return
        stopped = Stopped(number)
        code = stopped.code
        _state.report(str(stopped), code)
    elif now - _state.since <= _ECHO_SECONDS:
        return
    else:
        code = 128 + number
        with suppress(OSError):  # a closed terminal; past sys.stderr, which this may have interrupted
            os.write(2, b"second signal: exiting at once\n")
    # Not by an exception: PyTorch catches those that are raised while it loads or compiles.
    os._exit(code)
