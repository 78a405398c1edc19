"""Test what every console command does before its own work and at its end."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.runs import environment, flags

from cocor import cli

QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"


@pytest.mark.parametrize("given", [None, "1"])
def test_commands_use_all_queues_of_a_gpu(monkeypatch: pytest.MonkeyPatch, given: str | None) -> None:
    """Unless the user decides how many."""
    monkeypatch.setenv(QUEUES, "1")  # remembers what there was
    if given is None:
        monkeypatch.delenv(QUEUES)
    seen: list[str] = []
    assert cli.command("cocor-train", lambda: seen.append(os.environ[QUEUES])) == 0
    assert seen == [given or "32"]


_PROGRAM = """
import os, sys
from cocor import cli

def body():
    BODY

sys.exit(cli.command("test", body))
"""


def run(body: str, stdout: int) -> subprocess.CompletedProcess[str]:
    """A command of such a body."""
    program = _PROGRAM.replace("BODY", "\n    ".join(body.splitlines()))
    return subprocess.run(
        [sys.executable, "-c", program], env=environment() | {"PYTHONUNBUFFERED": ""}, stdout=stdout,
        stderr=subprocess.PIPE, text=True, check=False, timeout=300,
    )  # fmt: skip


def test_unread_output_ends_a_command_silently() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = run("for _ in range(100_000): print('a line')", stdout=writing)
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")


def test_output_onto_a_full_disk_is_one_line() -> None:
    with Path("/dev/full").open("w") as full:
        done = run("print('a line')", stdout=full.fileno())
    told = "test: error: No space left on device; free some space, or name another folder\n"
    assert (done.returncode, done.stderr) == (2, told)


def test_ranks_ignore_modules_of_the_folder(photo_folder: Path, tmp_path: Path) -> None:
    for name in ("random.py", "loaders.py"):
        (tmp_path / name).write_text("raise SystemExit('a program of the user')\n")
    installed = [sys.executable, "-P", "-c", "from cocor.cli import train; raise SystemExit(train())"]
    found = subprocess.run(
        [*installed, *flags(data=photo_folder, loader="torch", cpu_ranks=2), "--dry-run"],
        env=environment(), cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
