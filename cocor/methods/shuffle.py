"""Shuffle batches for MoCo's keys, into groups for BatchNorm on any rank.

The global batch is cut into as many chunks as there are groups. Each chunk is put into a random order and dealt out in
equal pieces, one to each group, so that every group holds images of every chunk. The order is a hash of the step: the
same on all ranks and after a resume, and computed on the device. As ranks hold whole chunks and whole groups, each
sends equally many images to each other rank, and none receives more than its own share. The groups depend on their
number alone, not on the number of ranks.

If groups are too small for equal pieces, the whole batch is shuffled instead, and all images gathered on every rank.
"""

import torch
from torch import Tensor

from cocor.methods.base import Ranks


def order(step: Tensor, count: int, groups: int) -> Tensor:
    """Return the shuffled global batch as indices (count,); groups are contiguous."""
    if not _deals(count, groups):
        return permutation(step, count)
    chunk = count // groups
    return _dealt(step, count, groups).view(groups, groups, chunk // groups).transpose(0, 1).flatten()


def shuffled(images: Tensor, step: Tensor, groups: int, ranks: Ranks) -> Tensor:
    """Shuffle the global batch: from this rank's part (B, ...) to its new part.

    ``groups`` counts those of all ranks.
    """
    local = len(images)
    count, first = ranks.size * local, ranks.rank * local
    if ranks.size == 1 or not _deals(count, groups):
        return ranks.gather(images)[order(step, count, groups)[first : first + local]]
    mine, piece = groups // ranks.size, count // groups**2
    dealt = (_dealt(step, count, groups)[first : first + local] - first).view(mine, ranks.size, mine, piece)
    sent = images[dealt.transpose(0, 1).flatten()]  # by receiver, chunk, its group, place
    arrived = ranks.exchange(sent).unflatten(0, (groups, mine, piece))  # by chunk, own group, place
    return arrived.transpose(0, 1).flatten(0, 2)


def permutation(step: Tensor, count: int) -> Tensor:
    """Order ``count`` items at random, by step number alone (splitmix64)."""
    return _hash(step, count).argsort(stable=True)


def _deals(count: int, groups: int) -> bool:
    """Tell whether each chunk can be dealt out in equal pieces."""
    return count % groups**2 == 0


def _dealt(step: Tensor, count: int, groups: int) -> Tensor:
    """Return the indices of all images by chunk, each in its random order."""
    within_chunk = _hash(step, count).view(groups, -1).argsort(stable=True)
    return (within_chunk + torch.arange(groups, device=step.device)[:, None] * (count // groups)).flatten()


def _hash(step: Tensor, count: int) -> Tensor:
    golden, first, second = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15
    x = (step * 0x100000000 + torch.arange(1, count + 1, device=step.device)) * golden
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * first
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * second
    return x ^ ((x >> 31) & 0x1FFFFFFFF)
