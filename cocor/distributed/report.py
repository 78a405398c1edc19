"""Failure reports of a process: exit codes, and where the message goes."""

import json
import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from cocor.distributed.env import RankEnv
from cocor.distributed.signals import INTERRUPTED, STOPPED

USER_ERROR = 2  # exit code


def report(message: str, code: int) -> None:
    """Print a failure; a rank of ``--gpus N`` writes it to a file for its launcher."""
    env, path = RankEnv.read(), os.environ.get("TORCHELASTIC_ERROR_FILE")
    if env.launcher == "cocor" and path:
        if code not in (USER_ERROR, STOPPED, INTERRUPTED):
            message = f"rank {env.rank} failed\n{message}"
        content = {"message": message, "code": code, "time": time.time(), "timestamp": int(time.time())}
        with suppress(OSError):
            try:
                Path(path).write_text(json.dumps(content))
                return
            except OSError:  # a full disk; PyTorch's launcher fails at half a report
                Path(path).unlink(missing_ok=True)
    try:
        print(message, file=sys.stderr)
    except OSError:  # a closed terminal
        drop_unwritten(sys.stderr)
    except RuntimeError:  # a signal while something is printed
        pass


def drop_unwritten(stream: TextIO) -> None:
    """Discard what ``stream`` buffers if it cannot be written.

    Python would try again, and fail, at exit and in forked data workers.
    """
    try:
        stream.flush()
    except (OSError, ValueError):
        with suppress(OSError, ValueError):  # a stream without a file descriptor
            number, nowhere = stream.fileno(), os.open(os.devnull, os.O_RDWR)
            kept = os.dup(number)
            os.dup2(nowhere, number)
            with suppress(OSError, ValueError):
                stream.flush()
            os.dup2(kept, number)
            for handle in (kept, nowhere):
                os.close(handle)
