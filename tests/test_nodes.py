"""The same command on several machines, here two "nodes" of one: under torchrun, and as Slurm's srun starts tasks."""

import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
from test_train import STEPS, environment, flags, metrics

from cocor import distributed, slurm
from loaders.errors import UserError


def test_tasks_of_srun_find_each_other_though_their_port_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", str(free_port()))
    monkeypatch.setenv("SLURM_STEP_NODELIST", "localhost")
    patience = timedelta(seconds=20)
    silent, other, *_ = slurm._ports()
    with socket.create_server(("", silent)), socket.create_server(("", other)) as talking, ThreadPoolExecutor() as pool:
        pool.submit(slurm._tell, talking, b"HTTP/1.1 400 Bad Request\n")
        with slurm.meeting(True, patience) as hosted:
            hosted.set("who", "main")

            def ask() -> bytes:
                with slurm.meeting(False, patience) as found:
                    return found.get("who")

            assert [pool.submit(ask).result(20) for _ in range(2)] == [b"main"] * 2
        talking.shutdown(socket.SHUT_RDWR)


def test_a_port_that_was_asked_for_and_is_taken_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        here = {"RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": port}
        for key, value in here.items():
            monkeypatch.setenv(key, str(value))
        for address in (None, "127.0.0.1"):
            if address is not None:
                monkeypatch.setenv("MASTER_ADDR", address)
            with pytest.raises(UserError, match=f"{port}.*MASTER_PORT|MASTER_PORT {port}"):
                distributed.init(use_gpu=False)


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
        "SLURM_JOB_ID": str(port),
    }  # fmt: skip
    return [sys.executable, "-m", "cocor.train", *arguments], environment() | job


@pytest.mark.parametrize("mistake", ["data", "output"])
def test_a_mistake_is_said_once_by_the_tasks_of_srun(photo_folder: Path, tmp_path: Path, mistake: str) -> None:
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run" / "metrics.jsonl").write_text("")
    data = tmp_path / "nowhere" if mistake == "data" else photo_folder
    output = tmp_path / ("new" if mistake == "data" else "run")
    arguments, port = flags(data=data, loader="torch", backbone="test_nfnet", output=output), free_port()
    nodes = []
    for node in range(2):
        command, variables = srun(node, port, arguments)
        nodes.append(subprocess.Popen(command, env=variables, stderr=subprocess.PIPE, text=True))
    errors = "".join(process.communicate(timeout=120)[1] for process in nodes)
    assert [process.returncode for process in nodes] == [2, 2]
    assert errors.startswith("cocor-train: error: ") and errors.count("\n") == 1


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
