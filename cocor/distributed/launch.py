"""Start a command's ranks on this machine, and pass on their first failure.

cocor-train --gpus 4  ->  run()  ->  four times ``python -m cocor.train ...`` by torch.distributed's launcher
torchrun / srun       ->  run()  ->  this process is a rank already: work at once
"""

import json
import logging
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from cocor.config.checks import check_ranks
from cocor.config.options import Config
from cocor.distributed import signals
from cocor.distributed.env import LAUNCHER, RESTARTS, STARTED, RankEnv
from cocor.distributed.report import USER_ERROR, report
from loaders.cpus import available_cores
from loaders.errors import UserError

_MOST_WORKERS = 16
# Exit codes after which restarting would fail the same way.
_EXPECTED = (USER_ERROR, signals.STOPPED, signals.INTERRUPTED)
_SUDDEN_ENDS = {
    signal.SIGKILL: "SIGKILL: killed by hand or for lack of memory",
    signal.SIGSEGV: "SIGSEGV, a crash in compiled code",
    signal.SIGBUS: "SIGBUS: most often /dev/shm is too small; lower --workers or enlarge it",
}


def run(config: Config, argv: Sequence[str], work: Callable[[Config, Any], None], module: str) -> None:
    """Do ``work(config, world)`` on every rank that ``config`` asks for.

    ``python -m module *argv`` must lead back here: that is how ranks are started, unless torchrun, Slurm or this
    function has already started this process as one of them.

    Raises:
        UserError: the machine lacks what is asked for.
        Ended: in the launching process, if a rank fails.
    """
    from cocor.distributed import collectives

    env = RankEnv.read()
    config = settle(config)
    ranks = config.gpus or config.cpu_ranks
    if ranks > 1 and env.launcher is None:
        _launch(ranks, [module, *argv], config.max_restarts)
        return
    work(config, collectives.init(use_gpu=bool(config.gpus)))
    collectives.shutdown()  # only after success: it waits for the other ranks


def settle(config: Config) -> Config:
    """Fill in what depends on this machine: GPUs, precision, worker threads.

    Raises:
        UserError: more GPUs asked for than present, or batches that the ranks cannot share evenly.
    """
    import torch

    present = torch.cuda.device_count() if torch.cuda.is_available() else 0
    env = RankEnv.read()
    if env.launcher is None:
        gpus = present if config.gpus is None else config.gpus
        if gpus > present:
            remedy = f"use --gpus {present} or fewer" if present else "use --gpus 0 to train on the CPU"
            raise UserError(f"--gpus {gpus}: asked for {gpus}, have {present}; {remedy}")
        ranks = local = gpus or config.cpu_ranks
    else:
        gpus = 0 if config.gpus == 0 or not present else env.local_size
        if config.gpus and config.gpus != gpus:
            raise UserError(f"--gpus {config.gpus}: there are {env.local_size} ranks and {present} GPUs here")
        ranks, local = env.size, env.local_size
    if gpus and config.cpu_ranks > 1:
        raise UserError("--cpu-ranks needs --gpus 0")
    check_ranks(config, ranks)
    workers = config.workers or max(1, min(_MOST_WORKERS, available_cores() // local))
    return replace(config, gpus=gpus, precision=config.precision or ("bf16" if gpus else "fp32"), workers=workers)


def _launch(ranks: int, module_and_arguments: list[str], max_restarts: int) -> None:
    os.environ |= {LAUNCHER: str(os.getpid()), STARTED: str(time.time())}
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, available_cores() // ranks)))
    # PyTorch's own restarts would not spare a user's mistake, nor a run that was asked to stop.
    for restarts in range(max_restarts + 1):
        os.environ[RESTARTS] = str(restarts)
        try:
            with signals.handled(report):  # PyTorch's launcher leaves its own signal handlers behind
                _start(ranks, module_and_arguments)
            return
        except signals.Ended as failure:
            if restarts == max_restarts or failure.code in _EXPECTED:
                raise
            with suppress(OSError):
                print(f"{failure}\nstarting all ranks again ({restarts + 1} of {max_restarts})", file=sys.stderr)


def _start(ranks: int, module_and_arguments: list[str]) -> None:
    """Start the ranks and wait for them. Raises Ended if one fails."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    for name in [name for name in logging.root.manager.loggerDict if name.startswith("torch.distributed.elastic")]:
        logging.getLogger(name).setLevel(logging.CRITICAL)  # failures are reported here, once
    handled = [number.name for number in signals.SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    with tempfile.TemporaryDirectory(prefix="cocor-launch-") as folder:
        settings = LaunchConfig(
            min_nodes=1, max_nodes=1, nproc_per_node=ranks, run_id="cocor", rdzv_backend="c10d",
            rdzv_endpoint="127.0.0.1:0", local_addr="127.0.0.1", max_restarts=0,  # any free port
            logs_specs=DefaultLogsSpecs(log_dir=folder), signals_to_handle=",".join(handled),
        )  # fmt: skip
        try:
            elastic_launch(settings, sys.executable)(*_where_modules_are(), "-m", *module_and_arguments)
        except ChildFailedError as error:
            raise _first_failure(Path(folder), error) from None
        except SignalException as error:
            report = _first_report(Path(folder))
            if report is not None and report["code"] in (signals.STOPPED, signals.INTERRUPTED):
                raise signals.Ended(report["message"], report["code"]) from None
            raise signals.Stopped(error.sigval, "before the step's end", "the last checkpoint") from None


def _where_modules_are() -> list[str]:
    """Return Python's flags with which ``-m`` imports what this process imports."""
    # By default it looks into the current folder first, which may hold a ``loaders/`` or ``random.py`` of the user's.
    here = Path.cwd()
    return [] if any(Path(place).absolute() == here for place in sys.path) else ["-P"]


def _first_report(folder: Path) -> dict[str, Any] | None:
    """Read the report of the rank that failed first, if there is one."""
    reports = []
    for path in folder.rglob("error.json"):
        with suppress(ValueError):  # killed while writing
            reports.append(json.loads(path.read_text()))
    return min(reports, key=lambda report: report["time"], default=None)


def _first_failure(folder: Path, error: Any) -> signals.Ended:
    """Return the first rank's failure; the others mostly complain about a lost peer.

    ``error`` is torch's ``ChildFailedError``, whose own ``get_first_failure`` knows whole seconds only.
    """
    first = _first_report(folder)
    for rank, failure in error.failures.items():
        # The launcher itself ends the other ranks: by SIGTERM and, half a minute later, by SIGKILL.
        sudden = failure.exitcode < 0 and -failure.exitcode != signal.SIGTERM and not Path(failure.error_file).exists()
        if sudden and (first is None or failure.timestamp <= first["time"] + 1):
            number = -failure.exitcode
            how = _SUDDEN_ENDS.get(number, f"signal {number} ({signal.strsignal(number)})")
            return signals.Ended(f"rank {rank} was ended by {how}", 128 + number)
    if first is not None:
        return signals.Ended(first["message"], first["code"])
    rank, failure = error.get_first_failure()
    code = failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    return signals.Ended(f"rank {rank} ended with exit code {failure.exitcode}", code)
