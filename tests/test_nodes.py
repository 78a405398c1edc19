"""The same command on several machines, here two "nodes" of one: under torchrun, and as Slurm's srun starts tasks."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from test_train import STEPS, environment, flags, metrics


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def torchrun(node: int, port: int, arguments: list[str]) -> tuple[list[str], dict[str, str]]:
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--node-rank={node}", "--nproc-per-node=1"),
        *("--master-addr=127.0.0.1", f"--master-port={port}", "-m", "cocor.train"),
    ]
    return [*command, *arguments], environment()


def srun(node: int, port: int, arguments: list[str]) -> tuple[list[str], dict[str, str]]:
    job = {
        "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": str(node), "SLURM_LOCALID": "0", "SLURM_NODEID": str(node),
        "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_STEP_NODELIST": "localhost,other",
        "SLURM_JOB_ID": str(os.getpid()),
        "MASTER_PORT": str(port),
    }  # fmt: skip
    return [sys.executable, "-m", "cocor.train", *arguments], environment() | job


@pytest.mark.parametrize("start", [torchrun, srun])
def test_two_nodes_make_one_run(photo_folder: Path, tmp_path: Path, start: type[object]) -> None:
    options = {"data": photo_folder, "loader": "torch", "backbone": "test_nfnet", "knn_every": 0, "log_samples": True}
    arguments, port = flags(**options, output=tmp_path / "run"), free_port()
    nodes = []
    for node in range(2):
        command, variables = start(node, port, arguments)  # type: ignore[call-arg, misc]
        nodes.append(
            subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        )
    for process in nodes:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
    rows = metrics(tmp_path / "run", "train")
    assert [row["step"] for row in rows] == list(range(1, 2 * STEPS + 1))
    seen = [index for row in metrics(tmp_path / "run", "samples")[:STEPS] for index in row["index"]]
    assert sorted(seen) == list(range(8 * STEPS))  # each image once an epoch, over both nodes
