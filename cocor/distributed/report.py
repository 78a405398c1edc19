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
        with suppress(OSError):  # a full disk
            Path(path).write_text(json.dumps(content))
            return
    try:
        print(message, file=sys.stderr)
    except OSError:  # a closed terminal
        drop_unwritten(sys.stderr)
    except RuntimeError:  # a signal while something is printed
        pass


def drop_unwritten(stream: TextIO) -> None:
    """Flush ``stream``, or lead it to the null device if it cannot be written.

    Python would try again, and fail, at exit and in forked data workers.
    """
    try:
        stream.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
