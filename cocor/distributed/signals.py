"""Stopping on request: a signal lets the step under way end, a checkpoint is written, and the exit code says so.

    SIGTERM, SIGHUP   from schedulers, ``kill``, a closed terminal    exit code 75: the same command goes on from here
    SIGUSR1           Slurm's warning before the time limit           exit code 75
    SIGINT            Ctrl-C                                          exit code 130: a loop in the shell ends as well

Before the first step there is nothing to save, and the first signal ends the process at once with the same code. While
PyTorch loads or compiles it does so without an exception (:func:`at_once`), which they might catch. A second signal
always ends the process at once, with 128 plus its number. Schedulers often signal a launcher *and* its ranks, so that
the same request arrives twice: what follows the first signal within half a second counts as an echo of it.

A disk that does not answer delays the end by ``PATIENCE`` seconds at most: if data have been awaited (:func:`awaited`)
for longer, the finished steps are saved without them (:func:`without_data`).
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from types import FrameType
from typing import NoReturn, TypeVar

STOPPED = 75  # EX_TEMPFAIL of sysexits.h
INTERRUPTED = 130
PATIENCE = 15.0  # seconds; schedulers and launchers kill half a minute after they have asked

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
_ECHO_SECONDS = 0.5
_LOOK_SECONDS = 0.5

Item = TypeVar("Item")


class Stopped(Exception):
    """The run was asked to stop and has done so; ``code`` is its exit code."""

    def __init__(self, signum: int, position: str = "before a step was made", where: str = "there") -> None:
        name = signal.Signals(signum).name
        super().__init__(f"stopped by {name} {position}; the same command with --resume goes on from {where}")
        self.code = INTERRUPTED if signum == signal.SIGINT else STOPPED


@dataclass
class _State:
    deferred: bool = False  # within deferred()
    worth_saving: bool = False  # since progress()
    signum: int = 0  # the first signal
    since: float = 0.0  # when it came
    give_up: Callable[[int], object] | None = None  # see without_data()
    awaiting: bool = False  # data, see awaited()
    awaited_since: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock)  # of awaiting and awaited_since


def _print(message: str, code: int) -> None:
    print(message, file=sys.stderr)


_state = _State()
_tell: Callable[[str, int], object] = _print


def requested() -> int:
    """The number of the signal that asked this process to stop, or 0."""
    return _state.signum


@contextmanager
def obeyed() -> Iterator[None]:
    """Within the block a signal raises :class:`Stopped` or, inside :func:`deferred`, is noted for later."""
    global _state
    _state = _State()
    try:
        with _received_by(_receive):
            yield
    finally:
        _state = _State()


@contextmanager
def _received_by(receive: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Let ``receive`` handle ``SIGNALS``, but for those that are ignored (nohup). No effect outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in SIGNALS}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, receive)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def at_once(tell: Callable[[str, int], object]) -> Iterator[None]:
    """Within the block a signal ends the process at once, after ``tell(message, exit code)``, unless inside
    :func:`obeyed`."""

    global _tell
    _tell = tell
    with _received_by(lambda number, frame: _leave(number)):
        yield


def _leave(number: int) -> NoReturn:
    leave(Stopped(number))


def leave(stopped: Stopped) -> NoReturn:
    """End this process at once, with the message and the code of ``stopped``."""
    _tell(str(stopped), stopped.code)
    os._exit(stopped.code)


@contextmanager
def deferred() -> Iterator[None]:
    """Within the block, once there is :func:`progress`, the first signal is only noted, and the caller looks at
    :func:`requested`. Before that it ends the process at once: the first step may take minutes to compile."""
    state = _state
    state.deferred, state.worth_saving = True, False
    try:
        with _watched(state):
            yield
    finally:
        state.deferred = False


@contextmanager
def _watched(state: _State) -> Iterator[None]:
    """Within the block a thread looks for a signal that comes while data are awaited: the main thread may be inside a
    library then, where Python's own signal handlers do not run."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    reading, writing = os.pipe()
    for end in (reading, writing):
        os.set_blocking(end, False)
    before, over = signal.set_wakeup_fd(writing, warn_on_full_buffer=False), threading.Event()
    watcher = threading.Thread(target=_watch, args=(state, reading, over), name="cocor-stop", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()
        signal.set_wakeup_fd(before)
        os.close(reading)
        os.close(writing)


def _watch(state: _State, wakeups: int, over: threading.Event) -> None:
    """Read the numbers of signals from ``wakeups``; give the process up if data are awaited for too long after one."""
    number, since = 0, 0.0
    while not over.wait(_LOOK_SECONDS):
        with suppress(BlockingIOError):
            numbers = [found for found in os.read(wakeups, 4096) if found in SIGNALS]
            if numbers and not number:
                number, since = numbers[0], time.monotonic()
        with state.lock:
            if number and state.awaiting and time.monotonic() - max(since, state.awaited_since) > PATIENCE:
                if state.worth_saving and state.give_up is not None:
                    state.give_up(number)
                _leave(number)


def without_data(give_up: Callable[[int], object]) -> None:
    """Have another thread call ``give_up(signal number)``, which must end the process, if a signal has come but no data
    have for ``PATIENCE`` seconds."""
    _state.give_up = give_up


def awaited(items: Generator[Item, None, None]) -> Generator[Item, None, None]:
    """Yield ``items``, marking the time spent on each as waiting for data; while the process is being given up, the
    caller stays in here. Closing them counts as well, as it waits for what is being read ahead."""
    state = _state
    try:
        while True:
            with _awaiting(state):
                item = next(items, None)
            if item is None:
                return
            yield item
    finally:
        with _awaiting(state):
            items.close()


@contextmanager
def _awaiting(state: _State) -> Iterator[None]:
    with state.lock:
        state.awaiting, state.awaited_since = True, time.monotonic()
    try:
        yield
    finally:
        with state.lock:
            state.awaiting = False


def progress() -> None:
    """Note that there is something to save: a step has been made."""
    _state.worth_saving = True


def _receive(number: int, frame: FrameType | None) -> None:
    now = time.monotonic()
    if not _state.signum:
        _state.signum, _state.since = number, now
        if not _state.deferred:
            raise Stopped(number)
        if not _state.worth_saving:
            _leave(number)
    elif now - _state.since > _ECHO_SECONDS:
        with suppress(OSError):  # a closed terminal; past sys.stderr, which this may have interrupted
            os.write(2, b"left at once, as asked twice\n")
        os._exit(128 + number)
