"""Test process groups over gloo, as ``--gpus N`` starts them, and the environment of torchrun and Slurm."""

from datetime import timedelta

import pytest
import torch
from helpers.runs import LAUNCHERS, Done, run

from cocor.config.options import Config
from cocor.config.resolve import load
from cocor.distributed import collectives
from cocor.distributed.env import RankEnv, first_host
from cocor.distributed.launch import settle
from loaders.cpus import available_cores
from loaders.errors import UserError


def ranks_do(work: str, ranks: int = 2) -> Done:
    flags = ["--gpus", "0", "--cpu-ranks", str(ranks)]
    return run(work, *flags, program=["-m", "helpers.rank_programs"])


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """No launcher in the environment."""
    for key in LAUNCHERS:
        monkeypatch.delenv(key, raising=False)
    return monkeypatch


@pytest.mark.parametrize(
    ("work", "ranks", "code", "said"),
    [
        ("collectives", 4, 0, ""), ("mistakes_of_one", 2, 0, ""),
        ("mistake", 2, 2, "test: error: no images in nowhere\n"),
    ],
)  # fmt: skip
def test_ranks_work_and_fail_together(work: str, ranks: int, code: int, said: str) -> None:
    done = ranks_do(work, ranks)
    assert (done.returncode, done.stderr) == (code, said)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
def test_collectives_between_gpus() -> None:
    done = run("collectives", "--gpus", "2", program=["-m", "helpers.rank_programs"])
    assert done.returncode == 0, done.stderr


def test_only_the_first_failure_is_shown() -> None:
    done = ranks_do("bug")
    assert done.returncode == 1
    assert done.stderr.startswith("rank 1 failed\nTraceback") and done.stderr.count("Traceback") == 1
    assert "ZeroDivisionError: division by zero" in done.stderr


def test_a_killed_rank_is_named() -> None:
    """Rather than another one that complains of it."""
    done = ranks_do("killed")
    assert done.returncode == 137 and done.stderr.startswith("rank 1 was ended by SIGKILL: killed")


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
    for key, value in {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "1"}.items():
        alone.setenv(key, value)
    assert RankEnv.read() == RankEnv()  # a shell or batch script is no rank
    step = {"STEP_NUM_TASKS": "8", "PROCID": "5", "LOCALID": "1", "STEP_TASKS_PER_NODE": "4(x2)"}
    for key, value in step.items():
        alone.setenv(f"SLURM_{key}", value)
    assert RankEnv.read() == RankEnv(5, 8, 1, 4, "srun")
    for key, value in {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}.items():
        alone.setenv(key, value)
    assert RankEnv.read() == RankEnv(3, 4, 1, 2, "torchrun")


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("gpu[03-05,9],x1", "gpu03"), ("n1,n2", "n1"), ("a-b[7]", "a-b7"), ("r[1-2].site", "r1.site"), ("one", "one")],
)
def test_the_first_host_of_a_slurm_node_list(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


def test_machine_values_are_settled_once(alone: pytest.MonkeyPatch) -> None:
    config = settle(load(["--gpus", "0", "--cpu-ranks", "2"]))
    assert (config.gpus, config.precision) == (0, "fp32")
    assert config.workers == max(1, min(16, available_cores() // 2))
    assert settle(config) == config
    assert settle(load(["--gpus", "0", "--workers", "3", "--precision", "bf16"])).workers == 3
    have = torch.cuda.device_count()
    with pytest.raises(UserError, match=f"asked for {have + 1}, have {have}"):
        settle(Config(gpus=have + 1, batch_size=8 * (have + 1), key_bn_splits=have + 1))
    for key, value in {"RANK": "0", "WORLD_SIZE": "3", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "3"}.items():
        alone.setenv(key, value)
    with pytest.raises(UserError, match="256 is no multiple of the 3 ranks; try 258"):
        settle(load(["--gpus", "0"]))


def test_left_over_variables_are_named(alone: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """RANK and WORLD_SIZE of an earlier program let a command wait for ranks that nobody starts."""
    for key, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
        alone.setenv(key, value)
    alone.setattr(collectives, "_TIMEOUT", timedelta(seconds=1))
    alone.setattr(collectives, "_PATIENCE_S", 0.1)
    with pytest.raises(torch.distributed.DistError):
        collectives.init(use_gpu=False)
    said = "rank 0 waits for others of 2; if there are none, unset RANK and WORLD_SIZE: 0 s so far"
    assert said in capsys.readouterr().err
