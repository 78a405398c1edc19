"""Real process groups over gloo, started as ``--gpus N`` starts them; who is who under torchrun and Slurm."""

import os
import subprocess
import sys

import pytest
import torch
from helpers.launchers import LAUNCHERS, TESTS

from cocor.config.options import Config
from cocor.config.resolve import load
from cocor.distributed import collectives
from cocor.distributed.env import RankEnv, first_host
from cocor.distributed.launch import settle
from loaders.cpus import available_cores
from loaders.errors import UserError


def run_ranks(work: str, *flags: str) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key not in LAUNCHERS}
    environment["PYTHONPATH"] = os.pathsep.join([str(TESTS.parent), str(TESTS)])
    return subprocess.run(
        [sys.executable, "-m", "helpers.rank_programs", work, *flags],
        env=environment, capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """No launcher in the environment."""
    for key in LAUNCHERS:
        monkeypatch.delenv(key, raising=False)
    return monkeypatch


@pytest.mark.parametrize("ranks", [2, 4])
def test_collectives_give_what_one_process_computes(ranks: int) -> None:
    run = run_ranks("collectives", "--gpus", "0", "--cpu-ranks", str(ranks))
    assert (run.returncode, run.stderr) == (0, "")


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
def test_collectives_between_gpus() -> None:
    run = run_ranks("collectives", "--gpus", "2")
    assert run.returncode == 0, run.stderr


def test_a_mistake_on_one_rank_is_one_line() -> None:
    run = run_ranks("mistake", "--gpus", "0", "--cpu-ranks", "2")
    assert (run.returncode, run.stderr) == (2, "test: error: no images in nowhere\n")


def test_a_mistake_on_one_rank_is_raised_on_all() -> None:
    run = run_ranks("mistakes_of_one", "--gpus", "0", "--cpu-ranks", "2")
    assert (run.returncode, run.stderr) == (0, "")


def test_only_the_first_failure_is_shown() -> None:
    run = run_ranks("bug", "--gpus", "0", "--cpu-ranks", "2")
    assert run.returncode == 1
    assert run.stderr.startswith("rank 1 failed\nTraceback") and run.stderr.count("Traceback") == 1
    assert "ZeroDivisionError: the first to fail" in run.stderr


@pytest.mark.parametrize(("how", "code"), [("killed", 9), ("aborted", 6)])
def test_a_killed_rank_is_named(how: str, code: int) -> None:
    """Rather than another one that complains of it."""
    run = run_ranks(how, "--gpus", "0", "--cpu-ranks", "2")
    assert run.returncode == 128 + code
    assert run.stderr.startswith(f"rank 1 was ended by {'SIGKILL: killed' if code == 9 else 'signal 6 (Aborted)'}")


def test_one_rank_needs_no_process_group(alone: pytest.MonkeyPatch) -> None:
    world = collectives.init(use_gpu=False)
    assert (world.rank, world.size, world.main, world.device.type) == (0, 1, True, "cpu")
    assert not torch.distributed.is_initialized()
    tensor = torch.ones(3, requires_grad=True)
    assert collectives.mean_over_ranks(tensor) is tensor
    assert collectives.gather(tensor).data_ptr() == tensor.data_ptr()
    collectives.barrier()
    collectives.shutdown()


def test_torchrun_and_srun_say_who_is_who(alone: pytest.MonkeyPatch) -> None:
    assert RankEnv.read() == RankEnv() and RankEnv.read().launcher is None
    alone.setenv("SLURM_STEP_NUM_TASKS", "8")
    alone.setenv("SLURM_PROCID", "5")
    alone.setenv("SLURM_LOCALID", "1")
    alone.setenv("SLURM_STEP_TASKS_PER_NODE", "4(x2)")
    assert RankEnv.read() == RankEnv(5, 8, 1, 4, "srun")
    for key, value in {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}.items():
        alone.setenv(key, value)
    assert RankEnv.read() == RankEnv(3, 4, 1, 2, "torchrun")


def test_a_slurm_shell_or_batch_script_is_no_rank(alone: pytest.MonkeyPatch) -> None:
    alone.setenv("SLURM_PROCID", "0")
    alone.setenv("SLURM_NTASKS", "8")
    alone.setenv("SLURM_STEP_NUM_TASKS", "1")
    assert RankEnv.read() == RankEnv()


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("gpu[03-05,9],x1", "gpu03"), ("n1,n2", "n1"), ("a-b[7]", "a-b7"), ("r[1-2].site", "r1.site"), ("one", "one")],
)
def test_the_first_host_of_a_slurm_node_list(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


def test_what_depends_on_the_machine_is_settled_once(alone: pytest.MonkeyPatch) -> None:
    config = settle(load(["--gpus", "0", "--cpu-ranks", "2"]))
    assert (config.gpus, config.precision) == (0, "fp32")
    assert config.workers == max(1, min(16, available_cores() // 2))
    assert settle(config) == config
    assert settle(load(["--gpus", "0", "--workers", "3", "--precision", "bf16"])).workers == 3


def test_too_many_gpus_are_refused_before_the_start(alone: pytest.MonkeyPatch) -> None:
    have = torch.cuda.device_count()
    with pytest.raises(UserError, match=f"asked for {have + 1}, have {have}"):
        settle(Config(gpus=have + 1, batch_size=8 * (have + 1), key_bn_splits=have + 1))


def test_the_batch_must_suit_the_launchers_ranks(alone: pytest.MonkeyPatch) -> None:
    for key, value in {"RANK": "0", "WORLD_SIZE": "3", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "3"}.items():
        alone.setenv(key, value)
    with pytest.raises(UserError, match="256 is no multiple of the 3 ranks; try 258"):
        settle(load(["--gpus", "0"]))
