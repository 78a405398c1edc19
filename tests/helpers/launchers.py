"""Ways to start several ranks."""

from pathlib import Path

TESTS = Path(__file__).parents[1]


LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID")
