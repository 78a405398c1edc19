"""What every console command does before its own work."""

import os

import pytest

from cocor import launch

QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(QUEUES, "1")  # remembers what there was


def test_commands_use_all_queues_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(QUEUES)
    seen: list[str] = []
    assert launch.command("cocor-train", lambda: seen.append(os.environ[QUEUES])) == 0
    assert seen == ["32"]


def test_the_user_decides_how_many_queues_are_used() -> None:
    seen: list[str] = []
    assert launch.command("cocor-train", lambda: seen.append(os.environ[QUEUES])) == 0
    assert seen == ["1"]
