"""Test the cosine schedule with its wait and warm-up."""

import math
from itertools import pairwise

import pytest

from cocor.step.optim import Cosine
from loaders.errors import UserError


def test_plain_cosine() -> None:
    schedule = Cosine(total=100)
    for step in (0, 1, 50, 99):
        assert schedule(step) == pytest.approx(0.5 * (1 + math.cos(math.pi * step / 100)))


def test_wait_then_warm_up_then_cosine() -> None:
    schedule = Cosine(total=110, warmup=4, wait=6, final=0.1)
    factors = [schedule(step) for step in range(110)]
    assert factors[:6] == [0.0] * 6
    assert factors[6:10] == pytest.approx([0.2, 0.4, 0.6, 0.8])
    assert factors[10] == 1.0
    assert all(a > b for a, b in pairwise(factors[10:]))
    assert factors[-1] > 0.1


def test_ends_of_the_schedule() -> None:
    assert [Cosine(total=100, final=0.25)(step) for step in (100, 1000)] == pytest.approx([0.25, 0.25])
    assert [Cosine(total=2, warmup=2)(step) for step in range(2)] == pytest.approx([1 / 3, 2 / 3])
    assert Cosine(total=0)(0) == 0.0
    with pytest.raises(UserError, match="shorten the warm-up"):
        Cosine(total=10, warmup=8, wait=3)
