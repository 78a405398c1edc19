"""Which rank this process is, from the environment that torchrun or srun has set."""

import os
import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Place:
    """This process is ``rank`` of ``size`` ranks, and ``local_rank`` of the ``local_size`` ranks of its machine."""

    rank: int
    size: int
    local_rank: int
    local_size: int


def place() -> Place | None:
    """The place of this process, from torchrun's or srun's environment; None if neither launched it."""
    env = os.environ
    if "RANK" in env and "WORLD_SIZE" in env:
        local = int(env.get("LOCAL_RANK", 0)), int(env.get("LOCAL_WORLD_SIZE", 1))
        return Place(int(env["RANK"]), int(env["WORLD_SIZE"]), *local)
    # Of Slurm's variables only srun sets this one; a batch script or an interactive shell is no rank.
    tasks = int(env.get("SLURM_STEP_NUM_TASKS", 1))
    if tasks > 1 and "SLURM_PROCID" in env:
        here = re.match(r"\d+", env.get("SLURM_STEP_TASKS_PER_NODE", "1"))  # such as 4(x2)
        return Place(int(env["SLURM_PROCID"]), tasks, int(env["SLURM_LOCALID"]), int(here.group()) if here else 1)
    return None


def torchrun_hosts() -> bool:
    """Whether torchrun, rather than a rank, hosts the store where the ranks meet: it exists before they start."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
