"""How the console commands begin and end, wherever their output goes and whenever Ctrl-C comes.

Ctrl-C while their modules load, or at the very end, shows no traceback. PyTorch takes seconds to load, and Python's own
way with Ctrl-C is an exception wherever it happens to be. So until a command looks after signals itself, and after it,
the system ends the process, as it does with programs that know nothing of signals: a shell sees exit code 130.

Where an output is closed (``2>&-``) what is said goes nowhere; where its reader has gone (``| head -1``) the command
ends in silence.
"""

import importlib
import os
import select
import signal
import sys
import threading
from contextlib import suppress
from typing import TextIO


def train() -> int:
    return _command("cocor.train")


def evaluate() -> int:
    return _command("cocor.eval.cli")


def export() -> int:
    return _command("cocor.export_cli")


def plot() -> int:
    return _command("cocor.plot")


def prepare() -> int:
    return _command("loaders.prep.cli")


def _command(module: str) -> int:
    """``main()`` of ``module``, which is loaded first, and looks after Ctrl-C by :func:`listen`."""
    open_streams()
    listens = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # not so in the background, under nohup
    if listens:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    main = importlib.import_module(module).main
    if module.startswith("loaders."):  # which knows nothing of this
        listen()
    try:
        return int(main())
    finally:
        if listens:
            signal.signal(signal.SIGINT, signal.SIG_DFL)


def listen() -> None:
    """From now on Ctrl-C is a KeyboardInterrupt, where it would end this process."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.default_int_handler)


def open_streams() -> None:
    """Open what is closed of the standard streams, to nowhere: the next file would get its number, and with it what
    libraries write there."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            nowhere = os.open(os.devnull, os.O_RDWR)  # the lowest number that is free
            os.set_inheritable(nowhere, True)  # by ranks and data workers
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))


def drop_unwritten(stream: TextIO) -> None:
    """Forget what a full disk or a pipe without a reader does not take of ``stream``: it would be tried again, and
    fail, when data workers are forked and at the end."""
    try:
        stream.flush()
    except (OSError, ValueError):
        with suppress(OSError, ValueError):  # no file at all
            _flush_to_nowhere(stream)


def _flush_to_nowhere(stream: TextIO) -> None:
    number, nowhere = stream.fileno(), os.open(os.devnull, os.O_RDWR)
    kept = os.dup(number)
    os.dup2(nowhere, number)
    with suppress(OSError, ValueError):
        stream.flush()
    os.dup2(kept, number)
    for handle in (kept, nowhere):
        os.close(handle)


def give_up_output() -> bool:
    """Send nowhere what the standard output does not take, so that Python does not complain of it at its end; returns
    whether its reader has gone."""
    looked = select.poll()
    looked.register(1, 0)  # errors only
    gone = bool(looked.poll(0))
    try:
        sys.stdout.flush()
        full = False
    except (OSError, ValueError):
        full = True
    if gone or full:
        nowhere = os.open(os.devnull, os.O_RDWR)
        os.dup2(nowhere, 1)
        os.close(nowhere)
    return gone
