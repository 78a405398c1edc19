"""Progress of long loops where nobody sits at a terminal."""

from collections.abc import Iterator

import pytest

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
