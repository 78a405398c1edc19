"""How the console commands begin and end: Ctrl-C while their modules load, or at the very end, shows no traceback.

PyTorch takes seconds to load, and Python's own way with Ctrl-C is an exception wherever it happens to be. So until a
command looks after signals itself, and after it, the system ends the process, as it does with programs that know
nothing of signals: a shell sees exit code 130.
"""

import importlib
import signal
import threading


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
