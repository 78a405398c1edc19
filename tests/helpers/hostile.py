"""What the tests of hostile input share: harm that would show, damage, and what a refusal must look like."""

import os
import random
import resource
import signal
import struct
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from cocor.train import main as train
from helpers.runs import flags
from loaders.errors import UserError

Refused = Callable[[Callable[[], int]], str]


class Harm:
    """Unpickled, it leaves the marker."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (str(self.marker),))


def refusal(capsys: pytest.CaptureFixture[str], command: Callable[[], int]) -> str:
    """Runs a command that must end with one line and exit code 2, soon; returns the line."""
    capsys.readouterr()
    with time_limit():
        assert command() == 2
    *_, line = capsys.readouterr().err.splitlines()
    assert "Traceback" not in line and len(line) < 1000
    return line


@contextmanager
def time_limit(seconds: int = 60) -> Iterator[None]:
    def stop(*_: object) -> None:
        raise TimeoutError(f"still at it after {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def run_train(**options: object) -> Callable[[], int]:
    return lambda: train(flags(**options))


@contextmanager
def limited(what: int, most: int) -> Iterator[None]:
    """Within the block this process may have no more than ``most`` of ``what``, such as ``resource.RLIMIT_FSIZE``."""
    limits = resource.getrlimit(what)
    resource.setrlimit(what, (most, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(what, limits)


def few_more_files(count: int) -> AbstractContextManager[None]:
    """Within the block this process may open no more than ``count`` files beside those it has open."""
    next_handle = os.open(os.devnull, os.O_RDONLY)
    os.close(next_handle)
    return limited(resource.RLIMIT_NOFILE, next_handle + count)


def damaged(data: bytes, rng: random.Random, within: tuple[int, int]) -> bytes:
    """``data`` with a few bytes, numbers or bits between two places changed."""
    changed = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 5])):
        at = rng.randrange(*within)
        numbers = [-1, 0, -8, (1 << 63) - 1, 1 << 40]
        new = rng.choice([*(struct.pack("<q", number) for number in numbers), b"\xff\xff", rng.randbytes(1)])
        changed[at : at + len(new)] = new
    return bytes(changed[: len(data)])


def one_line_or_none(action: Callable[[], object]) -> None:
    with time_limit():
        try:
            action()
        except UserError as mistake:
            assert "\n" not in str(mistake)
