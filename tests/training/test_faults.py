"""Test runs that are broken at random moments: the soak tests in short, and that documents name their tests."""

import os
import random
import time
from pathlib import Path

import pytest
from soak import faults, runs
from soak.runs import Lane, Start


def test_broken_runs_lose_nothing(tmp_path: Path) -> None:
    lanes = faults.make_lanes(tmp_path, ["torch"])
    done = runs.apart(faults.Rounds().make, lanes, 3, 0)
    assert done.outcomes.total() <= 3 and done.compared >= 1 and done.differing == 0


@pytest.mark.parametrize("fault", [faults.kill_everything, faults.kill_rank, faults.ask_to_stop])
@pytest.mark.parametrize("found", [True, False])
def test_a_run_may_end_before_its_fault(
    fault: faults.Fault, found: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, rank = (started(tmp_path, "true") for _ in range(2))
    rank.expect({0})
    monkeypatch.setattr(runs, "processes_of", lambda *_: [rank.pid] if found else [])
    fault(run, Lane("2 ranks", {}, tmp_path), random.Random(0))
    assert run.code == 0


def started(folder: Path, *command: str) -> Start:
    """A process that stands for a run."""
    (folder / "printed.txt").touch()
    pid = os.posix_spawnp(command[0], command, os.environ, setsid=True)
    return Start(pid, time.time(), folder / "printed.txt")
