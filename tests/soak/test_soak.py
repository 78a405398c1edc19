"""Soak: ``ROUNDS=100 pytest -m soak -n 2 -rP tests/soak`` breaks trainings and conversions again and again."""

import os
import statistics
from pathlib import Path

import pytest
from soak import conversions, faults, runs

pytestmark = pytest.mark.soak
ROUNDS = int(os.environ.get("ROUNDS", "100"))


@pytest.mark.parametrize("names", ["torch, ffcv", "dali, 2 ranks, 2 ranks with restarts, torchrun"])
def test_broken_runs_lose_nothing(names: str, tmp_path: Path) -> None:
    lanes = faults.make_lanes(tmp_path, names.split(", "))
    done = runs.apart(faults.Rounds().make, lanes, ROUNDS // 2, len(names))
    print(*(f"{count:4d} {what}" for what, count in sorted(done.outcomes.items())), sep="\n")
    print(f"{done.compared} runs compared; {statistics.fmean(done.recovered):.1f} s from a start to its first step")
    assert done.compared and not done.differing


def test_killed_conversions_leave_nothing(tmp_path: Path) -> None:
    conversions.rounds(conversions.make_images(tmp_path / "images"), tmp_path, 2 * ROUNDS)
