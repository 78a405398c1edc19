"""Short form of the soak tests: runs that are broken at random moments end as if nothing had happened."""

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


def test_resumed_runs_are_equal_on_a_cpu(tmp_path: Path) -> None:
    images = runs.make_images(tmp_path / "images")
    flags = {"data": images, "val_data": images, "loader": "synthetic", "synthetic_images": runs.IMAGES}
    lane = Lane("synthetic", flags | {"checkpoint_every_minutes": 0}, tmp_path / "runs")
    assert runs.apart(runs.compare, lane) == (0.0, 0.0)


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


def test_no_run_outlives_a_failed_comparison(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Start] = []

    def start(lane: Lane, *more: str) -> Start:
        made.append(started(tmp_path, "sleep", "600"))
        return made[-1]

    def never(*_: object) -> None:
        raise AssertionError("no step is made")

    monkeypatch.setattr(runs, "start", start)
    monkeypatch.setattr(runs, "wait_until", never)
    with pytest.raises(AssertionError, match="no step is made"):
        runs.compare(Lane("torch", {}, tmp_path / "runs"))
    monkeypatch.undo()
    for run in made:
        run.expect({-9})
    assert [run.code for run in made] == [-9, -9, -9]


def started(folder: Path, *command: str) -> Start:
    """A process that stands for a run."""
    (folder / "printed.txt").touch()
    pid = os.posix_spawnp(command[0], command, os.environ, setsid=True)
    return Start(pid, time.time(), folder / "printed.txt")
