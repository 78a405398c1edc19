"""The label split: stratified, nested, reproducible, and never without a class."""

import numpy as np
import pytest

from loaders.datasets.labels import stratified_split

LABELS = np.random.default_rng(0).integers(-1, 10, 5000)


@pytest.mark.parametrize("seed", [0, 1])
def test_smaller_fractions_lie_inside_larger_ones(seed: int) -> None:
    sets = [set(stratified_split(LABELS, fraction, seed).tolist()) for fraction in (0.001, 0.01, 0.1, 1.0)]
    assert sets[0] < sets[1] < sets[2] < sets[3]
    assert len(sets[3]) == (LABELS >= 0).sum()


def test_every_class_gives_its_share() -> None:
    sizes = np.bincount(LABELS[LABELS >= 0])
    for fraction in (0.0001, 0.01, 0.1):
        chosen = LABELS[stratified_split(LABELS, fraction, 0)]
        assert np.array_equal(np.bincount(chosen), np.maximum(1, np.floor(sizes * fraction + 0.5)))


def test_only_the_seed_decides_among_labelled() -> None:
    assert np.array_equal(stratified_split(LABELS, 0.1, 3), stratified_split(LABELS, 0.1, 3))
    assert not np.array_equal(stratified_split(LABELS, 0.1, 3), stratified_split(LABELS, 0.1, 4))
    assert (LABELS[stratified_split(LABELS, 1.0, 0)] >= 0).all()
    assert len(stratified_split(np.full(5, -1), 0.5, 0)) == 0
