"""Start console commands: one-line errors, exit codes, Ctrl-C, lost outputs.

Exit codes: 0 done, 1 a bug, 2 a user's mistake, 75 stopped by a signal, 130 Ctrl-C, 141 nobody reads the output.
"""

# Little is imported here: until _command() has begun, Ctrl-C shows a traceback.
import importlib
import os
import signal
import sys
import threading
from collections.abc import Callable

UNREAD = 128 + signal.SIGPIPE  # a shell's exit code for programs that SIGPIPE ends
_LOST = ("Connection closed by peer", "Connection reset by peer", "remote process exit")  # gloo's and NCCL's words


def train() -> int:
    return _command("cocor-train", "cocor.train", first=_read_flags)


def evaluate() -> int:
    return _command("cocor-eval", "cocor.eval.cli")


def export() -> int:
    return _command("cocor-export", "cocor.eval.export.command")


def plot() -> int:
    return _command("cocor-plot", "cocor.monitor.plot")


def prepare() -> int:
    return _command("cocor-prep", "loaders.prep.cli")


def _read_flags() -> None:
    """Read cocor-train's flags before PyTorch, which takes seconds to load."""
    from cocor.config.resolve import read

    read(sys.argv[1:])


def _command(name: str, module: str, first: Callable[[], None] | None = None) -> int:
    """Do ``first``, import ``module`` and run its ``main()``.

    SIGINT has its default action before ``main()``: Python would raise KeyboardInterrupt wherever it is while PyTorch
    loads, and print a traceback.
    """
    # Read when PyTorch loads. Its threads would spin while they wait, for cores that other programs need.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    handled = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # not if ignored, as for background jobs
    if handled:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from cocor.distributed.report import USER_ERROR

    try:
        if first is not None and (code := command(name, first, listening=False)):
            return code
        try:
            main = importlib.import_module(module).main
        except Exception as error:
            print(f"{name}: error: {_why_not_imported(error)}", file=sys.stderr)
            return USER_ERROR
        if module.startswith("loaders."):  # which does not import this module
            listen()
        return int(main())
    finally:
        if handled:
            signal.signal(signal.SIGINT, signal.SIG_DFL)


def _why_not_imported(error: Exception) -> str:
    """Say in one line what a command's modules lack; raise ``error`` if it is a bug."""
    from loaders.errors import UserError, explain

    if lack := explain(error):
        return lack
    from cocor.run_dir import check_pair

    try:
        check_pair()
    except UserError as mistake:
        return str(mistake)
    raise error


def command(name: str, body: Callable[[], None], listening: bool = True) -> int:
    """Run the ``body`` of a command; return its exit code, after one line on stderr.

    It is ``listening`` to Ctrl-C unless SIGINT is to keep its action.
    """
    import warnings

    from cocor.distributed.env import die_with_launcher
    from cocor.distributed.report import drop_unwritten, report
    from loaders.dali import cuda_env
    from loaders.text import print_everything

    die_with_launcher()
    cuda_env.use_all()
    print_everything()
    warnings.filterwarnings("ignore", module=r"PIL\.")  # which names no file; images that cannot be used are named
    # PyTorch's own, at the first torch.func.jvp of a process.
    warnings.filterwarnings("ignore", "`torch.jit.script` is deprecated", FutureWarning)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # warns, with pages of C++ frames, that a rank has gone
    try:
        if listening:
            listen()
        body()
        sys.stdout.flush()  # now, as a failure at interpreter exit could not be reported
        code = 0
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    except Exception as error:
        message, code = _explain(name, error)
        if message:
            report(message, code)
    for stream in (sys.stdout, sys.stderr):
        drop_unwritten(stream)  # Python would end with exit code 120
    return code


def _explain(name: str, error: Exception) -> tuple[str, int]:
    """Return message and exit code for ``error``; raise a single process' bug."""
    from cocor.distributed.env import RankEnv
    from cocor.distributed.report import USER_ERROR
    from cocor.distributed.signals import Ended, Stopped
    from loaders.errors import UserError, explain

    if isinstance(error, Ended):
        return (f"{name}: {error}" if isinstance(error, Stopped) else str(error)), error.code
    if isinstance(error, BrokenPipeError):
        return "", UNREAD
    if mistake := str(error) if isinstance(error, UserError) else explain(error):
        return f"{name}: error: {mistake}", USER_ERROR
    env = RankEnv.read()
    if env.launcher is None:
        raise error
    if env.size > 1 and any(words in str(error) for words in _LOST):
        return f"{name}: rank {env.rank} has lost another rank, which says why", 1
    import traceback

    return traceback.format_exc(), 1


def listen() -> None:
    """Let Ctrl-C raise KeyboardInterrupt, unless it is ignored."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.default_int_handler)
