"""The order of an epoch: a pure function of (seed, epoch), the same samples for any number of ranks."""

import numpy as np
import pytest

from loaders.errors import UserError
from loaders.views.order import BatchOrder, CyclicOrder


def seen(order: BatchOrder, epoch: int) -> np.ndarray:
    return np.concatenate([order.indices(epoch, step) for step in range(order.steps)])


def test_every_sample_comes_once_an_epoch() -> None:
    order = BatchOrder(103, 10, seed=1, drop_last=False)
    assert order.steps == 11
    assert np.array_equal(np.sort(seen(order, 0)), np.arange(103))
    assert not np.array_equal(seen(order, 0), seen(order, 1))
    assert not np.array_equal(seen(order, 0), seen(BatchOrder(103, 10, seed=2, drop_last=False), 0))
    assert np.array_equal(seen(order, 7), seen(BatchOrder(103, 10, seed=1, drop_last=False), 7))
    assert np.array_equal(seen(BatchOrder(7, 3, shuffle=False, drop_last=False), 5), np.arange(7))


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_ranks_share_each_global_batch(world_size: int) -> None:
    alone = BatchOrder(1000, 32, seed=3)
    ranks = [BatchOrder(1000, 32, seed=3, rank=rank, world_size=world_size) for rank in range(world_size)]
    assert {rank.steps for rank in ranks} == {31}
    for step in (0, 17, 30):
        together = np.concatenate([rank.indices(2, step) for rank in ranks])
        assert np.array_equal(together, alone.indices(2, step))
        assert len({len(rank.indices(2, step)) for rank in ranks}) == 1


def test_the_dropped_tail_changes_between_epochs() -> None:
    order = BatchOrder(39, 10)
    missed = [set(range(39)) - set(seen(order, epoch).tolist()) for epoch in range(4)]
    assert all(len(tail) == 9 for tail in missed) and len({frozenset(tail) for tail in missed}) == 4


@pytest.mark.parametrize("kind", ["epochs", "cycles"])
def test_stand_ins_come_from_the_next_batch(kind: str) -> None:
    def order(rank: int, world_size: int) -> BatchOrder:
        if kind == "epochs":
            return BatchOrder(22, 4, seed=1, rank=rank, world_size=world_size)
        return CyclicOrder(22, 4, steps=7, seed=1, rank=rank, world_size=world_size)

    alone = order(0, 1)
    for step in range(3):
        found = [list(alone.stand_ins(1, step, place)) for place in range(4)]
        assert [first for first, *_ in found] == [
            (int(index), int(number))
            for index, number in zip(alone.indices(1, step + 1), alone.passes(1, step + 1), strict=True)
        ]
        assert all(sorted({sample for sample, _ in others}) == list(range(22)) for others in found)
        shared = [list(order(rank, 2).stand_ins(1, step, place)) for rank in range(2) for place in range(2)]
        assert shared == found


def test_impossible_batch_sizes_are_refused() -> None:
    with pytest.raises(UserError, match="--batch-size"):
        BatchOrder(5, 8)
    with pytest.raises(UserError, match="--batch-size"):
        BatchOrder(100, 10, world_size=4)


@pytest.mark.parametrize("world_size", [1, 2])
def test_small_sets_are_cycled(world_size: int) -> None:
    orders = [CyclicOrder(7, 4, steps=5, seed=1, rank=rank, world_size=world_size) for rank in range(world_size)]
    index, passes = (
        np.concatenate([getattr(order, part)(epoch, step) for epoch in (0, 1) for step in range(5) for order in orders])
        for part in ("indices", "passes")
    )
    assert len(index) == 40 and orders[0].steps == 5
    for number in range(5):
        assert np.array_equal(np.sort(index[passes == number]), np.arange(7))
    assert not np.array_equal(index[:7], index[7:14])
    large = CyclicOrder(3, 8, steps=2)  # a batch larger than the set
    pairs = sorted(zip(large.passes(0, 0), large.indices(0, 0), strict=True))
    assert pairs[:6] == [(number, i) for number in (0, 1) for i in range(3)]
