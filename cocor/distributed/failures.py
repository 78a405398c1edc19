"""How failures are reported: the message, the process that prints it, and the exit code (2 for a user's mistake, 1 for
a bug).

A rank that :mod:`cocor.distributed.launch` has started writes its failure to a file instead of the shared terminal.
The launcher
prints only the first one: the others are mostly complaints about a lost peer. Among ranks that torchrun or srun has
started, only one prints a message that all of them have.
"""

import json
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from cocor import cli
from cocor.distributed import signals

USER_ERROR = 2  # exit code
UNREAD = 128 + signal.SIGPIPE  # exit code when nobody reads the output: a shell's, for programs that SIGPIPE ends

# Environment variable of ranks that cocor.distributed.launch has started: the launcher's process id.
LAUNCHED = "COCOR_LAUNCHED"
_SUDDEN_ENDS = {
    signal.SIGKILL: "SIGKILL: killed by hand or for lack of memory",
    signal.SIGSEGV: "SIGSEGV, a crash in compiled code",
    signal.SIGBUS: "SIGBUS: most often /dev/shm is too small; lower --workers or enlarge it",
}


class RanksFailed(Exception):
    """At least one rank failed: the message to print and the exit code."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code

    @property
    def may_pass(self) -> bool:
        """Whether another start may succeed: not after a user's mistake, nor when a signal asked the ranks to stop."""
        return self.code not in (USER_ERROR, signals.STOPPED, signals.INTERRUPTED)


def fail(message: str, code: int) -> int:
    """Report ``message`` to the user or, in a rank that cocor.distributed.launch started, to the launcher; returns
    ``code``. Of
    ranks that torchrun or srun started, only the first prints it."""
    if LAUNCHED in os.environ or not _told_by_another(message):
        tell(message, code)
    return code


def tell(message: str, code: int) -> None:
    """As :func:`fail`, but without asking other ranks, so that a signal handler can call it."""
    report = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if LAUNCHED in os.environ and report:
        expected = code in (USER_ERROR, signals.STOPPED, signals.INTERRUPTED)
        rank = "" if expected else f"rank {os.environ.get('RANK')} failed\n"
        content = {"message": rank + message, "code": code, "time": time.time(), "timestamp": int(time.time())}
        with suppress(OSError):
            try:
                Path(report).write_text(json.dumps(content))
                return
            except OSError:  # a full disk; PyTorch's launcher fails at half a report
                Path(report).unlink(missing_ok=True)
    try:
        print(message, file=sys.stderr)
    except OSError:  # a closed terminal
        cli.drop_unwritten(sys.stderr)
    except RuntimeError:  # a signal while something is printed
        pass


def _told_by_another(message: str) -> bool:
    """Whether another rank that torchrun or srun started has printed the same (loads PyTorch only in such ranks)."""
    if "RANK" not in os.environ and "SLURM_PROCID" not in os.environ:
        return False
    from cocor import said

    return said.by_another(message)


def first_report(folder: Path) -> dict[str, Any] | None:
    """The report of the rank that failed first, see :func:`tell`; None if there is none."""
    reports = []
    for path in folder.rglob("error.json"):
        with suppress(ValueError):  # killed while writing
            reports.append(json.loads(path.read_text()))
    return min(reports, key=lambda report: report["time"], default=None)


def first_failure(folder: Path, error: Any) -> RanksFailed:
    """The failure of the rank that failed first. ``folder`` holds the reports of ranks; ``error`` is torch's
    ``ChildFailedError``, which also knows of ranks that a signal killed before they could report."""
    first = first_report(folder)
    for rank, failure in error.failures.items():
        # The launcher itself ends the other ranks: by SIGTERM and, half a minute later, by SIGKILL.
        sudden = failure.exitcode < 0 and -failure.exitcode != signal.SIGTERM
        if sudden and (first is None or failure.timestamp <= first["time"] + 1):
            number = -failure.exitcode
            how = _SUDDEN_ENDS.get(number, f"signal {number} ({signal.strsignal(number)})")
            return RanksFailed(f"rank {rank} was ended by {how}", 128 + number)
    if first is not None:
        return RanksFailed(first["message"], first["code"])
    rank, failure = error.get_first_failure()
    code = failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    return RanksFailed(f"rank {rank} ended with exit code {failure.exitcode}", code)
