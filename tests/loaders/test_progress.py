"""Progress of long loops where nobody sits at a terminal."""

import time
from collections.abc import Iterator

import pytest
import torch

from cocor.eval.probes.softmax_regression import SoftmaxRegression
from loaders import progress


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    clock = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    return clock


def test_the_time_left_does_not_count_the_start(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    """The first batch comes after 20 s of starting programs, then ten images a second."""

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
    assert list(progress.track(range(5), 5, "images")) == [0, 1, 2, 3, 4]
    assert capsys.readouterr().err == ""  # what takes seconds is quiet


def test_uneven_items_promise_no_time_left(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    pulse = progress.Pulse()
    for number in progress.track(range(3), 3, "solving", unit="penalties", even=False):
        for iteration in range(5 * number):
            clock[0] += 10.0
            pulse.beat(f"penalty {number}, {iteration + 1} iterations")
    second = [f"penalty 2, {number} iterations" for number in (1, 4, 7, 10)]
    assert capsys.readouterr().err.splitlines() == ["penalty 1, 3 iterations", "solving: 2 of 3 penalties", *second]


def test_a_slow_solver_tells_how_far_it_is(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(progress, "_LINE_EVERY_S", 0.0)
    torch.manual_seed(0)
    SoftmaxRegression(torch.rand(40, 4), torch.arange(40) % 3, 3).fit_all([1.0, 0.1, 0.01])
    assert "solving: penalties 1 to 3 of 3, 2 iterations" in capsys.readouterr().err.splitlines()


def test_a_slow_library_is_waited_for_aloud(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "_LINE_EVERY_S", 0.01)
    with progress.patience("scikit-learn fits"):
        time.sleep(0.2)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) > 1 and set(lines) == {"scikit-learn fits: 0 s so far"}
    time.sleep(0.05)
    assert capsys.readouterr().err == ""
