"""Kill ``cocor-train`` in the middle of its work on files: ``python -m helpers.kill_points MOMENT... -- FLAGS...``.

For each moment, a share of all calls that make, sync, rename, lock or remove something of the run, one is started in a
folder of its own, killed before that call, and started again. Prints a line of JSON for each: the moment, the call, and
the second start's exit code. Forked, since importing takes longer than such a run.
"""

import fcntl
import json
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import torch

from cocor.train import main

CALLS: list[tuple[Any, str]] = [
    (os, "fsync"), (os, "open"), (os, "truncate"), (fcntl, "flock"), (shutil, "rmtree"),
    (Path, "replace"), (Path, "unlink"), (Path, "mkdir"),
]  # fmt: skip


def start(flags: list[str], deadly: int | None, told: Path) -> int:
    """A run that is killed before call number ``deadly``, which is ``told``, as is the number of all calls of one that
    comes to its end. Returns the exit code."""
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    code, count, output = 1, 0, flags[-1].partition("=")[2]

    def counted(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal count
            # Others open files as well, for caches that are not there yet.
            count += name in ("fsync", "flock") or any(output in str(argument) for argument in arguments)
            if deadly and count == deadly:  # 0 only counts
                told.write_text(f"{name} {' '.join(map(str, arguments))}")
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*arguments, **options)

        setattr(owner, name, call)

    try:
        torch.set_num_threads(1)
        if deadly is not None:
            for owner, name in CALLS:
                counted(owner, name)
        code = main(flags)
        told.write_text(str(count))
    finally:
        os._exit(code)


if __name__ == "__main__":
    cut = sys.argv.index("--")
    moments, flags, place = [float(moment) for moment in sys.argv[1:cut]], sys.argv[cut + 2 :], Path(sys.argv[cut + 1])
    told = place / "told"
    assert start([*flags, f"--output={place / 'whole'}"], 0, told) == 0
    calls = int(told.read_text())
    for moment in moments:
        again = [*flags, "--resume", f"--output={place / str(moment)}"]
        assert start(again, 1 + int(moment * (calls - 1)), told) == -signal.SIGKILL
        print(json.dumps([moment, told.read_text(), start(again, None, told)]), flush=True)
