"""How the console commands begin and end, wherever their output goes and whenever Ctrl-C comes.

Ctrl-C shows no traceback, not even while modules load (PyTorch takes seconds) or at the very end, where Python would
raise KeyboardInterrupt wherever it happens to be. Until a command handles signals itself, and after it, SIGINT has its
default action instead: the system ends the process, and a shell sees exit code 130.

If an output stream is closed (``2>&-``), what is printed to it is dropped; if its reader has gone (``| head -1``), the
command ends in silence.
"""

import importlib
import os
import select
import signal
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import TextIO


def train() -> int:
    return _command("cocor-train", "cocor.train")


def evaluate() -> int:
    return _command("cocor-eval", "cocor.eval.cli")


def export() -> int:
    return _command("cocor-export", "cocor.eval.weights.export_cli")


def plot() -> int:
    return _command("cocor-plot", "cocor.monitor.plot")


def prepare() -> int:
    return _command("cocor-prep", "loaders.prep.cli")


def _command(name: str, module: str) -> int:
    """Import ``module`` and run its ``main()``, which calls :func:`listen` once it can handle Ctrl-C itself."""
    open_streams()
    handled = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # not if ignored, as for background jobs
    if handled:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        Path.cwd()
    except OSError as error:  # Intel's library would say that PyTorch cannot be loaded
        print(f"{name}: error: the current folder cannot be used: {error.strerror}; cd to another one", file=sys.stderr)
        return 2
    try:
        main = importlib.import_module(module).main
    except (ImportError, MemoryError, OSError) as error:
        return _without(name, error)
    if module.startswith("loaders."):  # which does not import this module
        listen()
    try:
        return int(main())
    finally:
        if handled:
            signal.signal(signal.SIGINT, signal.SIG_DFL)


def _without(name: str, error: Exception) -> int:
    """Report in one line what the machine lacks to import the command's modules; raises ``error`` if it is a bug."""
    from loaders.errors import explain

    lack = explain(error)
    if not lack:
        raise error
    print(f"{name}: error: {lack}", file=sys.stderr)
    return 2


def listen() -> None:
    """Let Ctrl-C raise KeyboardInterrupt from now on, if it would end this process; if it is ignored it stays so."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.default_int_handler)


def open_streams() -> None:
    """Open those standard streams that are closed, on the null device: the next file to be opened would otherwise get
    the stream's descriptor, and with it whatever libraries print."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            nowhere = os.open(os.devnull, os.O_RDWR)  # the lowest number that is free
            os.set_inheritable(nowhere, True)  # by ranks and data workers
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))


def drop_unwritten(stream: TextIO) -> None:
    """Discard what ``stream`` still buffers if it cannot be written (a full disk, a pipe without a reader). Python
    would try again, and fail, at exit and in forked data workers."""
    try:
        stream.flush()
    except (OSError, ValueError):
        with suppress(OSError, ValueError):  # a stream without a file descriptor
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
    """Redirect stdout to the null device if it cannot be written, so that Python does not complain about it at exit;
    returns whether its reader has gone."""
    poll = select.poll()
    poll.register(1, 0)  # errors only
    reader_gone = bool(poll.poll(0))
    try:
        sys.stdout.flush()
        failed = False
    except (OSError, ValueError):
        failed = True
    if reader_gone or failed:
        nowhere = os.open(os.devnull, os.O_RDWR)
        os.dup2(nowhere, 1)
        os.close(nowhere)
    return reader_gone
