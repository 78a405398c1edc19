"""Progress of long loops where nobody sits at a terminal."""

import time
from collections.abc import Iterator

import pytest
import torch

from cocor.eval.probes.softmax_regression import SoftmaxRegression
from loaders import progress


def test_the_time_left_does_not_count_the_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first batch comes after 20 s of starting programs, then ten images a second."""
    clock = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])

    def batches() -> Iterator[int]:
        clock[0] += 20.0
        yield 0
        for number in range(1, 10):
            clock[0] += 31.0 if number == 1 else 10.0
            yield number

    assert list(progress.track(batches(), 1000, "images", unit="images", step=100)) == list(range(10))
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "images: 100 of 1,000 images"
    assert lines[1] == "images: 200 of 1,000 images, about 248 s left"
    assert lines[2] == "images: 500 of 1,000 images, about 76 s left"


def test_what_takes_seconds_is_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(progress.track(range(5), 5, "images")) == [0, 1, 2, 3, 4]
    assert capsys.readouterr().err == ""


def test_items_of_uneven_length_promise_no_time_and_are_heard_of_meanwhile(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    pulse = progress.Pulse()
    for number in progress.track(range(3), 3, "solving", unit="penalties", even=False):
        for iteration in range(5 * number):
            clock[0] += 10.0
            pulse.beat(f"penalty {number}, {iteration + 1} iterations")
    assert capsys.readouterr().err.splitlines() == [
        "penalty 1, 3 iterations",
        "solving: 2 of 3 penalties",
        "penalty 2, 1 iterations",
        "penalty 2, 4 iterations",
        "penalty 2, 7 iterations",
        "penalty 2, 10 iterations",
    ]


def test_a_solver_that_takes_long_tells_how_far_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "_LINE_EVERY_S", 0.0)
    torch.manual_seed(0)
    SoftmaxRegression(torch.rand(40, 4), torch.arange(40) % 3, 3).fit_all([1.0, 0.1, 0.01])
    assert "solving: penalties 1 to 3 of 3, 2 iterations" in capsys.readouterr().err.splitlines()


def test_a_library_that_works_for_long_is_waited_for_aloud(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "_LINE_EVERY_S", 0.01)
    with progress.patience("scikit-learn fits"):
        time.sleep(0.2)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) > 1 and set(lines) == {"scikit-learn fits: 0 s so far"}
    time.sleep(0.05)
    assert capsys.readouterr().err == ""
