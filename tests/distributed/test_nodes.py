"""Test the command on two nodes, here of one machine, as Slurm's srun starts tasks."""

import os
import socket
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from helpers.runs import STEPS, command, environment, flags, metrics

from cocor.distributed import collectives
from cocor.train import main as train
from loaders.errors import UserError


def test_a_taken_master_port_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        here = {"RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": port}
        for key, value in here.items():
            monkeypatch.setenv(key, str(value))
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        with pytest.raises(UserError, match=f"MASTER_PORT {port}: another program has taken it"):
            collectives.init(use_gpu=False)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def variables(node: int, port: int) -> dict[str, str]:
    """The environment of a task of srun."""
    job = {"STEP_NUM_TASKS": 2, "PROCID": node, "LOCALID": 0, "NODEID": node, "STEP_TASKS_PER_NODE": "1(x2)",
           "STEP_NODELIST": "localhost,other", "JOB_ID": port}  # fmt: skip
    return environment() | {f"SLURM_{key}": str(value) for key, value in job.items()}


def test_a_mistake_is_one_line_of_each_srun_task(tmp_path: Path) -> None:
    nodes = ends(flags(data=tmp_path / "nowhere", loader="torch", output=tmp_path / "run"))
    assert [code for code, *_ in nodes] == [2, 2]
    assert all(error.startswith("cocor-train: error: ") and error.count("\n") == 1 for *_, error in nodes)


def ends(arguments: list[str]) -> list[Any]:
    """Exit codes, moments of the end, and errors of two nodes."""
    port, options = free_port(), {"stderr": subprocess.PIPE, "text": True}
    nodes = [subprocess.Popen(command(*arguments), env=variables(node, port), **options) for node in range(2)]

    def end(process: subprocess.Popen[str]) -> tuple[int, float, str]:
        errors = process.communicate(timeout=300)[1]
        return process.returncode, time.monotonic(), errors

    with ThreadPoolExecutor() as pool:
        return list(pool.map(end, nodes))


def test_an_unreadable_image_on_one_rank_ends_all(photo_copy: Path, tmp_path: Path) -> None:
    options = {"loader": "torch", "backbone": "test_nfnet", "knn_every": 0, "mmnn": "constants", "on_error": "stop"}
    assert train(flags(data=photo_copy, output=tmp_path / "one", **options, epochs=1)) == 0  # sizes are known by now
    file = sorted(photo_copy.glob("*/*.jpg"))[7]
    status = file.stat()
    file.write_bytes(file.read_bytes()[:300].ljust(status.st_size, b"0"))
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    (code, ended, errors), (other, other_ended, other_errors) = ends(
        flags(data=photo_copy, output=tmp_path / "two", **options)
    )
    assert 2 in (code, other) and code and other and abs(ended - other_ended) < 10
    said = [line for line in (errors + other_errors).splitlines() if "error: " in line]
    assert len(said) == 1 and file.name in said[0] and "Traceback" not in errors + other_errors


def test_two_nodes_make_one_run(photo_folder: Path, tmp_path: Path) -> None:
    options = {"data": photo_folder, "loader": "torch", "backbone": "test_nfnet", "knn_every": 0, "log_samples": True}
    options["max_restarts"] = 1  # which srun does not know of
    nodes = ends(flags(**options, output=tmp_path / "run"))
    assert [code for code, *_ in nodes] == [0, 0], nodes
    said = "".join(errors for *_, errors in nodes)
    assert said.count("warning: --max-restarts has no effect") == 1
    rows = metrics(tmp_path / "run", "train")
    assert [row["step"] for row in rows] == list(range(1, 2 * STEPS + 1))
    seen = [index for row in metrics(tmp_path / "run", "samples")[:STEPS] for index in row["index"]]
    assert sorted(seen) == list(range(8 * STEPS))  # each image once an epoch, over both nodes
