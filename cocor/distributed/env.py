"""Read this process's rank, as torchrun, srun or ``--gpus N`` has set it."""

import ctypes
import os
import re
import signal
import sys
from dataclasses import dataclass

# Environment variables of our own launcher (cocor.distributed.launch) for its ranks.
LAUNCHER = "COCOR_LAUNCHED"  # its process id
STARTED = "COCOR_STARTED"  # when it began, in seconds since the epoch
RESTARTS = "COCOR_RESTARTS"  # how often it has restarted them

_FIRST_PORT, _PORTS = 20_000, 12_000  # below those that the system gives to clients


@dataclass(frozen=True)
class RankEnv:
    """Say which rank of ``size`` this is, and of ``local_size`` on this machine.

    ``launcher`` is "torchrun", "srun" or, for ``--gpus N``, "cocor"; None in a process that the user started.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    launcher: str | None = None

    @classmethod
    def read(cls) -> "RankEnv":
        """Read the environment of this process."""
        env = os.environ
        if "RANK" in env:
            local = int(env.get("LOCAL_RANK", 0)), int(env.get("LOCAL_WORLD_SIZE", 1))
            launcher = "cocor" if LAUNCHER in env else "torchrun"
            return cls(int(env["RANK"]), int(env.get("WORLD_SIZE", 1)), *local, launcher)
        # Of Slurm's variables only srun sets this one: a batch script or an interactive shell is no rank.
        tasks = int(env.get("SLURM_STEP_NUM_TASKS", 1))
        if tasks > 1 and "SLURM_PROCID" in env:
            here = re.match(r"\d+", env.get("SLURM_STEP_TASKS_PER_NODE", "1"))  # such as 4(x2)
            local = int(env["SLURM_LOCALID"]), int(here.group()) if here else 1
            return cls(int(env["SLURM_PROCID"]), tasks, *local, "srun")
        return cls()

    @property
    def first(self) -> bool:
        """Tell whether this process prints what a command prints once."""
        return self.launcher is None or (self.launcher != "cocor" and self.rank == 0)

    @property
    def restarts(self) -> int:
        """Count the launcher's restarts after failures."""
        return int(os.environ.get(RESTARTS) or os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))

    def set_address(self) -> None:
        """Set ``MASTER_ADDR`` and ``MASTER_PORT`` for tasks of srun, which sets neither."""
        env = os.environ
        if self.launcher == "srun":
            nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST", "localhost")
            job, step = int(env.get("SLURM_JOB_ID", 0)), int(env.get("SLURM_STEP_ID", 0))
            env.setdefault("MASTER_ADDR", first_host(nodes))
            env.setdefault("MASTER_PORT", str(_FIRST_PORT + (job * 7 + step) % _PORTS))


def first_host(nodes: str) -> str:
    """Return the first host of Slurm's node list: ``gpu[03-05,9],x`` gives ``gpu03``."""
    head = re.match(r"([^,\[]*)(?:\[(\d+)[^\]]*\]([^,]*))?", nodes)
    assert head is not None  # the pattern matches any text
    return "".join(part or "" for part in head.groups())


def die_with_launcher() -> None:
    """Have the kernel kill this rank when its launcher dies."""
    # It would train on, beside the ranks of the next start.
    if sys.platform == "linux" and "TORCHELASTIC_RUN_ID" in os.environ:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.environ.get(LAUNCHER, str(os.getppid())) != str(os.getppid()):  # it has died before the call
            os.kill(os.getpid(), signal.SIGKILL)
