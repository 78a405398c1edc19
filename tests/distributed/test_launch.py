"""Test what every console command does before its own work and at its end."""

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.hostile import limited
from helpers.runs import Capture, environment, flags

from cocor import cli
from cocor.distributed import report as reporting
from cocor.distributed.env import LAUNCHER

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


def run(body: str, *closed: int, stdout: int = subprocess.PIPE) -> subprocess.CompletedProcess[str]:
    """A command of such a body, with these standard streams closed."""

    def close() -> None:
        for stream in closed:
            os.close(stream)

    program = _PROGRAM.replace("BODY", "\n    ".join(body.splitlines()))
    return subprocess.run(
        [sys.executable, "-c", program], env=environment() | {"PYTHONUNBUFFERED": ""}, stdout=stdout,
        stderr=subprocess.PIPE, text=True, preexec_fn=close, check=False, timeout=300,
    )  # fmt: skip


def test_closed_streams_do_not_end_up_in_files(tmp_path: Path) -> None:
    file = tmp_path / "file"
    done = run(
        f"handle = os.open({str(file)!r}, os.O_CREAT | os.O_RDWR)\n"
        "assert handle > 2 and not sys.stderr.isatty() and sys.stdin.read() == ''\n"
        "print('gone'); print('gone', file=sys.stderr); os.system('echo gone; echo gone >&2')\n",
        *(0, 1, 2),
    )
    assert done.returncode == 0 and file.read_text() == ""


@pytest.mark.parametrize("lines", [1, 100_000])  # which fill no buffer, and many
def test_unread_output_ends_a_command_silently(lines: int) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = run(f"for _ in range({lines}): print('a line')", stdout=writing)
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")


def test_a_closed_terminal_keeps_the_exit_code() -> None:
    done = run(
        "reading, writing = os.pipe()\n"
        "os.close(reading); os.dup2(writing, 2)\n"
        "try: print('a line', file=sys.stderr)\n"
        "except OSError: return\n"
        "raise AssertionError\n"
    )
    assert done.returncode == 0


@pytest.mark.parametrize("lines", [1, 100_000])
def test_output_onto_a_full_disk_is_one_line(lines: int) -> None:
    with Path("/dev/full").open("w") as full:
        done = run(f"for _ in range({lines}): print('a line')", stdout=full.fileno())
    told = "test: error: No space left on device; free some space, or name another folder\n"
    assert (done.returncode, done.stderr) == (2, told)


def test_a_full_disk_still_prints_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    report = tmp_path / "error.json"
    for key, value in {"TORCHELASTIC_ERROR_FILE": str(report), LAUNCHER: "1", "RANK": "0"}.items():
        monkeypatch.setenv(key, value)
    with limited(resource.RLIMIT_FSIZE, 8):
        reporting.report("no room", 2)
    assert capsys.readouterr().err == "no room\n" and not report.exists()


def test_ranks_import_nothing_from_the_current_folder(photo_folder: Path, tmp_path: Path) -> None:
    for name in ("random.py", "loaders.py"):
        (tmp_path / name).write_text("raise SystemExit('a program of the user')\n")
    installed = [sys.executable, "-P", "-c", "from cocor.cli import train; raise SystemExit(train())"]
    found = subprocess.run(
        [*installed, *flags(data=photo_folder, loader="torch", cpu_ranks=2), "--dry-run"],
        env=environment(), cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
