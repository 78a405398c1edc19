"""From one command to its processes: settle what depends on the machine, start the ranks, report what went wrong.

    cocor-train --gpus 4  ->  run()  ->  four times ``python -m cocor.train ...`` by torch.distributed's launcher
    torchrun / srun       ->  run()  ->  this process is a rank already: work at once

A rank that fails writes its error to a file instead of the shared terminal. The launcher then stops the other ranks,
shows the *first* failure only, and leaves with that rank's exit code: 2 for a user's mistake, 1 for a bug.
"""

import json
import logging
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from cocor.config import Config, check_ranks
from loaders.errors import UserError

USER_ERROR = 2  # exit codes
INTERRUPTED = 130

_LAUNCHED = "COCOR_LAUNCHED"  # set for ranks that this module starts
_MOST_WORKERS = 16
_SUDDEN_ENDS = {
    signal.SIGKILL: "SIGKILL: killed by hand or for lack of memory",
    signal.SIGSEGV: "SIGSEGV, a crash in compiled code",
    signal.SIGBUS: "SIGBUS: most often /dev/shm is too small; lower --workers or enlarge it",
}


class RanksFailed(Exception):
    """At least one rank failed: what to print, and the exit code."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


def command(name: str, body: Callable[[], None]) -> int:
    """Run a console command's body and return its exit code. A user's mistake becomes one line on stderr."""
    try:
        body()
        return 0
    except UserError as error:
        return _fail(f"{name}: error: {error}", USER_ERROR)
    except RanksFailed as error:
        print(error, file=sys.stderr)
        return error.code
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception:
        if _LAUNCHED not in os.environ:
            raise
        return _fail(traceback.format_exc(), 1)


def run(config: Config, argv: Sequence[str], work: Callable[[Config, Any], None], module: str) -> None:
    """Do ``work(config, world)`` on every rank that ``config`` asks for.

    ``python -m module *argv`` must lead back here: so the other ranks are started, unless torchrun, Slurm or this
    function itself has started this process as one of them.

    Raises:
        UserError: the machine lacks what is asked for.
        RanksFailed: in the launching process, if a rank fails.
    """
    from cocor import distributed

    config = settle(config)
    ranks = config.gpus or config.cpu_ranks
    if ranks > 1 and distributed.place() is None:
        return _launch(ranks, [module, *argv])
    world = distributed.init(use_gpu=bool(config.gpus))
    work(config, world)
    distributed.shutdown()  # not after an error: it would wait for the other ranks
    return None


def settle(config: Config) -> Config:
    """``config`` with GPUs, precision and worker threads filled in for this machine.

    Raises:
        UserError: more GPUs asked for than present, or batches that the ranks cannot share evenly.
    """
    import torch

    from cocor.distributed import place

    present = torch.cuda.device_count() if torch.cuda.is_available() else 0
    here = place()
    if here is None:
        gpus = present if config.gpus is None else config.gpus
        if gpus > present:
            raise UserError(f"--gpus {gpus}: asked for {gpus}, have {present}; {_remedy(present)}")
        ranks = local = gpus or config.cpu_ranks
    else:
        gpus = 0 if config.gpus == 0 or not present else here.local_size
        if config.gpus and config.gpus != gpus:
            raise UserError(f"--gpus {config.gpus}: there are {here.local_size} ranks and {present} GPUs here")
        ranks, local = here.size, here.local_size
    if gpus and config.cpu_ranks > 1:
        raise UserError("--cpu-ranks needs --gpus 0")
    check_ranks(config, ranks)
    workers = config.workers or max(1, min(_MOST_WORKERS, usable_cpus() // local))
    return replace(config, gpus=gpus, precision=config.precision or ("bf16" if gpus else "fp32"), workers=workers)


def _remedy(present: int) -> str:
    return f"use --gpus {present} or fewer" if present else "use --gpus 0 to train on the CPU"


def usable_cpus() -> int:
    """CPUs that this process may run on, which a container or Slurm often makes fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _launch(ranks: int, module_and_arguments: list[str]) -> None:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    os.environ[_LAUNCHED] = "1"
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, usable_cpus() // ranks)))
    for name in [name for name in logging.root.manager.loggerDict if name.startswith("torch.distributed.elastic")]:
        logging.getLogger(name).setLevel(logging.CRITICAL)  # failures are reported here, once
    with tempfile.TemporaryDirectory(prefix="cocor-launch-") as folder:
        settings = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=ranks,
            run_id="cocor",
            rdzv_backend="c10d",
            rdzv_endpoint="127.0.0.1:0",  # any free port
            local_addr="127.0.0.1",
            max_restarts=0,
            logs_specs=DefaultLogsSpecs(log_dir=folder),
        )
        try:
            elastic_launch(settings, sys.executable)("-m", *module_and_arguments)
        except ChildFailedError as error:
            raise _first_failure(Path(folder), error) from None
        except SignalException as error:
            raise RanksFailed(f"stopped by {error.sigval.name}", 128 + error.sigval) from None


def _first_failure(folder: Path, error: Any) -> RanksFailed:
    """Of all failed ranks the one that failed first; the others mostly complain that it is gone."""
    reports = [json.loads(path.read_text()) for path in folder.rglob("error.json")]
    first = min(reports, key=lambda report: report["time"], default=None)
    for rank, failure in error.failures.items():
        hint = _SUDDEN_ENDS.get(-failure.exitcode)
        # The launcher itself kills ranks that outlive the first failure by half a minute.
        if hint is not None and (first is None or failure.timestamp <= first["time"] + 1):
            return RanksFailed(f"rank {rank} was ended by {hint}", 128 - failure.exitcode)
    if first is not None:
        return RanksFailed(first["message"], first["code"])
    rank, failure = error.get_first_failure()
    code = failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    return RanksFailed(f"rank {rank} ended with exit code {failure.exitcode}", code)


def _fail(message: str, code: int) -> int:
    """Tell the user, or in a launched rank the launcher, what happened."""
    report = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if _LAUNCHED in os.environ and report:
        rank = "" if code == USER_ERROR else f"rank {os.environ.get('RANK')} failed\n"
        content = {"message": rank + message, "code": code, "time": time.time(), "timestamp": int(time.time())}
        Path(report).write_text(json.dumps(content))
    else:
        print(message, file=sys.stderr)
    return code
