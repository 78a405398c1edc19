"""Which of the ranks this process is, by the environment that torchrun or srun has given it."""

import os
import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Place:
    """What a launcher says: this process is ``rank`` of ``size``, on its machine ``local_rank`` of ``local_size``."""

    rank: int
    size: int
    local_rank: int
    local_size: int


def place() -> Place | None:
    """Who this process is, by torchrun's or srun's environment; None if neither launched it."""
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
    """Whether torchrun, and no rank, hosts the store where the ranks meet: it is there before them."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
