"""From one command to its processes: settle what depends on the machine, start the ranks, report what went wrong.

    cocor-train --gpus 4  ->  run()  ->  four times ``python -m cocor.train ...`` by torch.distributed's launcher
    torchrun / srun       ->  run()  ->  this process is a rank already: work at once

If a rank fails, the launcher stops the others, prints the *first* failure only, and exits with that rank's exit code
(:mod:`cocor.distributed.failures`). Signals to the launcher reach all ranks (:mod:`cocor.distributed.signals`). With
``--max-restarts`` all ranks
are started again after one has died, and go on from the last checkpoint, as they do when torchrun restarts them. No
rank outlives its launcher.
"""

import ctypes
import logging
import os
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from cocor import cli, leaving, loopback, run_dir
from cocor.config.checks import check_ranks
from cocor.config.options import Config
from cocor.distributed import signals
from cocor.distributed.env import place
from cocor.distributed.failures import (
    LAUNCHED,
    UNREAD,
    USER_ERROR,
    RanksFailed,
    fail,
    first_failure,
    first_report,
    tell,
)
from loaders.dali import cuda_env
from loaders.errors import UserError, explain
from loaders.text import print_everything

# Environment variables that the launcher sets for its ranks.
_STARTED = "COCOR_STARTED"  # when it began, in seconds since the epoch
_RESTARTS = "COCOR_RESTARTS"  # how often it has restarted them
_MOST_WORKERS = 16


def command(name: str, body: Callable[[], None], *, ranks: bool = False) -> int:
    """Run a console command's body and return its exit code. A user's mistake becomes one line on stderr. ``ranks``:
    torchrun or srun may start the command as several ranks, which then wait to meet each other.

    A rank that is still among others, because no :func:`cocor.distributed.collectives.shutdown` came before, exits
    here instead of
    returning.
    """
    cuda_env.use_all()
    cli.open_streams()
    print_everything()
    # PyTorch's own, at the first torch.func.jvp of a process.
    warnings.filterwarnings("ignore", "`torch.jit.script` is deprecated", FutureWarning)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # warns, with pages of C++ frames, that a rank has gone
    try:
        cli.listen()
        code = _code(name, body, ranks)
    except SystemExit as ending:  # --help, a signal, another rank's failure: the message is printed already
        if isinstance(ending.code, int) and _among_others():
            leaving.tell_others(ending.code)
            leaving.end(ending.code)
        raise
    except KeyboardInterrupt:
        code = signals.INTERRUPTED
        leaving.tell_others(code)
    cli.drop_unwritten(sys.stderr)  # Python would end with exit code 120
    if _among_others():
        leaving.end(code)
    return code


def _code(name: str, body: Callable[[], None], ranks: bool) -> int:
    try:
        body()
        sys.stdout.flush()  # now, as a failure at interpreter exit could not be reported
        return 0
    except UserError as error:
        return fail_alone(f"{name}: error: {error}", USER_ERROR, ranks)
    except RanksFailed as error:
        return fail(str(error), error.code)
    except signals.Stopped as ended:
        return fail_alone(f"{name}: {ended}", ended.code)
    except Exception as error:
        if isinstance(error, OSError) and cli.give_up_output() and isinstance(error, BrokenPipeError):
            return fail_alone("", UNREAD)
        lack = explain(error)
        if lack:
            return fail_alone(f"{name}: error: {lack}", USER_ERROR, ranks)
        if begins():
            raise
        return fail_alone(traceback.format_exc(), 1, ranks)


def _among_others() -> bool:
    """Whether this process is one of several ranks that have met, or are about to."""
    if leaving.in_company():
        return True
    if "torch.distributed" not in sys.modules:
        return False
    from cocor.distributed import collectives

    return collectives.ranks() > 1


def fail_alone(message: str, code: int, meet: bool = False) -> int:
    """Report a failure that other ranks may know nothing of, to the user and to them; returns ``code``. ``meet``: also
    if the ranks have not met yet."""
    leaving.alone()
    if meet and not begins() and LAUNCHED not in os.environ:
        from cocor import meeting

        if meeting.is_due():
            meeting.fail_before(message, code, lambda: tell(message, code))
            return code
    if message:
        fail(message, code)
    leaving.tell_others(code)
    return code


def leave_at_once(message: str, code: int) -> None:
    """As :func:`fail_alone`, for a signal handler: it may have interrupted the import of what asks other ranks."""
    if leaving.in_company():
        fail_alone(message, code)
    else:
        tell(message, code)
    leaving.flush()


def begins() -> bool:
    """Whether the user started this process: it is none of the ranks that a launcher starts, or restarts."""
    return not {"RANK", LAUNCHED, "SLURM_STEP_NUM_TASKS"} & os.environ.keys()


def speaks() -> bool:
    """Whether this process prints what is to be printed once: the launcher, or rank 0 under torchrun or srun."""
    rank = os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0"))
    return begins() or (LAUNCHED not in os.environ and rank == "0")


def launched_elsewhere() -> bool:
    """Whether torchrun or srun, rather than this module, has started this process as one of the ranks."""
    if begins() or LAUNCHED in os.environ:
        return False
    return place() is not None


def run(config: Config, argv: Sequence[str], work: Callable[[Config, Any], None], module: str) -> None:
    """Do ``work(config, world)`` on every rank that ``config`` asks for.

    ``python -m module *argv`` must lead back here: that is how ranks are started, unless torchrun, Slurm or this
    function has already started this process as one of them.

    Raises:
        UserError: the machine lacks what is asked for.
        RanksFailed: in the launching process, if a rank fails.
    """
    from cocor.distributed import collectives

    if place() is not None:
        _die_with_launcher()
    config = settle(config)
    ranks = config.gpus or config.cpu_ranks
    if ranks > 1 and place() is None:
        return _launch(ranks, [module, *argv], config.max_restarts)
    world = collectives.init(use_gpu=bool(config.gpus))
    with signals.obeyed(), collectives.company():
        work(_resuming_after_restart(config), world)
    collectives.shutdown()  # only after success: it waits for the other ranks
    return None


def _resuming_after_restart(config: Config) -> Config:
    """``config``, made to resume if :func:`_launch` or torchrun has restarted this rank after a failure."""
    restarts = int(os.environ.get(_RESTARTS) or os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    file = config.output / run_dir.CONFIG
    if not restarts or not file.is_file():
        return config
    if config.overwrite and file.stat().st_mtime < float(os.environ.get(_STARTED, "0")):
        return config  # the first start failed before it overwrote what is there
    elsewhere = config.resume not in (None, "auto")
    if elsewhere and not run_dir.checkpoints(config.output / run_dir.CHECKPOINTS):
        return replace(config, overwrite=True)  # the first start failed before it saved a checkpoint of its own
    return replace(config, resume="auto", overwrite=False)


def _die_with_launcher() -> None:
    """Have the kernel kill this rank when its launcher dies: it would train on, beside the ranks of the next start."""
    if sys.platform == "linux" and (LAUNCHED in os.environ or "TORCHELASTIC_RUN_ID" in os.environ):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.environ.get(LAUNCHED, str(os.getppid())) != str(os.getppid()):  # it has died before the call
            os.kill(os.getpid(), signal.SIGKILL)


def settle(config: Config) -> Config:
    """``config`` with GPUs, precision and worker threads filled in for this machine.

    Raises:
        UserError: more GPUs asked for than present, or batches that the ranks cannot share evenly.
    """
    import torch

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


def _launch(ranks: int, module_and_arguments: list[str], max_restarts: int) -> None:
    loopback.check()
    os.environ |= {LAUNCHED: str(os.getpid()), _STARTED: str(time.time())}
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, usable_cpus() // ranks)))
    for restarts in range(max_restarts + 1):
        os.environ[_RESTARTS] = str(restarts)
        try:
            with signals.at_once(
                tell
            ):  # again for each start: PyTorch's launcher leaves its own signal handlers behind
                _start(ranks, module_and_arguments)
            return
        except RanksFailed as failure:
            if restarts == max_restarts or not failure.may_pass:
                raise
            with suppress(OSError):
                print(f"{failure}\nstarting all ranks again ({restarts + 1} of {max_restarts})", file=sys.stderr)


def _start(ranks: int, module_and_arguments: list[str]) -> None:
    """Start the ranks and wait for them. Raises RanksFailed."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    for name in [name for name in logging.root.manager.loggerDict if name.startswith("torch.distributed.elastic")]:
        logging.getLogger(name).setLevel(logging.CRITICAL)  # failures are reported here, once
    with tempfile.TemporaryDirectory(prefix="cocor-launch-") as folder:
        try:
            settings = LaunchConfig(
                min_nodes=1,
                max_nodes=1,
                nproc_per_node=ranks,
                run_id="cocor",
                rdzv_backend="c10d",
                rdzv_endpoint=f"{loopback.ADDRESS}:0",  # any free port
                local_addr=loopback.ADDRESS,
                max_restarts=0,
                logs_specs=DefaultLogsSpecs(log_dir=folder),
            )
            forwarded = [number.name for number in signals.SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
            settings.signals_to_handle = ",".join(forwarded)
            elastic_launch(settings, sys.executable)(*_where_modules_are(), "-m", *module_and_arguments)
        except ChildFailedError as error:
            raise first_failure(Path(folder), error) from None
        except SignalException as error:
            report = first_report(Path(folder))
            if report is not None and report["code"] in (signals.STOPPED, signals.INTERRUPTED):
                raise RanksFailed(report["message"], report["code"]) from None
            name = error.sigval.name
            raise RanksFailed(f"stopped by {name} before the step's end", 128 + error.sigval) from None


def _where_modules_are() -> list[str]:
    """Python's flags with which ``-m`` imports what this process imports: by default it looks into the current folder
    first, which may hold a ``loaders/`` or ``random.py`` of the user's."""
    here = Path.cwd()
    return [] if any(Path(place).absolute() == here for place in sys.path) else ["-P"]
