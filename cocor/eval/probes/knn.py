"""Classify features by weighted nearest neighbours (Wu et al., CVPR 2018, 3.4).

For every query, the k bank features of largest cosine similarity s vote for their classes with weight exp(s / T).
The result is deterministic: similarities are float32, ties between neighbours go to the first in the bank, votes are
summed as integers, so that their order does not matter, and ties between classes go to the lower one.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

_CHUNK_BYTES = 256 * 2**20
_ONE_VOTE = 2**40  # the weight of the nearest neighbour; 2**23 neighbours fit into int64


@dataclass(frozen=True)
class KnnResult:
    """Top-1 ``accuracy`` in [0, 1] of labelled queries by a labelled bank.

    ``note`` says if ``k`` had to be reduced, else it is empty.
    """

    accuracy: float
    k: int
    queries: int
    bank: int
    note: str = ""


def knn_accuracy(
    queries: Tensor, query_labels: Tensor, bank: Tensor, bank_labels: Tensor, *, k: int = 200, temperature: float = 0.07
) -> KnnResult:
    """Classify features (N, D) by the bank (M, D); labels below 0 are left out.

    Raises:
        ValueError: features that are not finite, or no labelled features.
    """
    queries, query_labels = queries[query_labels >= 0], query_labels[query_labels >= 0]
    bank, bank_labels = bank[bank_labels >= 0], bank_labels[bank_labels >= 0]
    if not len(queries) or not len(bank):
        raise ValueError("k-NN needs labelled queries and a labelled bank")
    (predicted,) = knn_predict(queries, bank, bank_labels, [k], temperature=temperature)
    return _result(predicted, query_labels, k, len(bank), len(bank))


def knn_curve(
    queries: Tensor, query_labels: Tensor, bank: Tensor, bank_labels: Tensor, ks: Sequence[int], *,
    temperature: float = 0.07, leave_one_out: bool = False,
) -> list[KnnResult]:  # fmt: skip
    """Classify with several k from one search, all labels known.

    With ``leave_one_out`` the queries are the bank. All ranks call it with the same arguments; each does a part, and
    all get the whole result.
    """
    how = {"leave_one_out": leave_one_out, "shared": True}
    predicted = knn_predict(queries, bank, bank_labels, ks, temperature=temperature, **how)
    most = len(bank) - leave_one_out
    return [_result(row, query_labels, k, len(bank), most) for row, k in zip(predicted, ks, strict=True)]


def _result(predicted: Tensor, labels: Tensor, k: int, bank: int, most: int) -> KnnResult:
    accuracy = (predicted == labels.to(predicted.device)).double().mean().item()
    note = f"k = {k} is more than the bank holds; used {most}" if k > most else ""
    return KnnResult(accuracy, min(k, most), len(labels), bank, note)


@torch.no_grad()
def knn_predict(
    queries: Tensor, bank: Tensor, bank_labels: Tensor, ks: Sequence[int], *, temperature: float,
    leave_one_out: bool = False, shared: bool = False,
) -> Tensor:  # fmt: skip
    """Predict each query's class, int64 (len(ks), N), by the bank (M, D) with its labels.

    Each k is clipped to the bank. With ``leave_one_out``, query i is bank feature i and does not vote for itself.
    """
    # ``shared``: ranks share out the chunks that one process would compute, so that rounding does not depend on their
    # number.
    if not (torch.isfinite(queries).all() and torch.isfinite(bank).all()):
        raise ValueError("features are not finite")
    bank_labels = bank_labels.to(bank.device)
    ks, classes = [min(k, len(bank) - leave_one_out) for k in ks], int(bank_labels.max()) + 1
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if shared and dist.is_initialized() else (0, 1)
    predicted = torch.zeros(len(ks), len(queries), dtype=torch.int64, device=bank.device)
    for part, values, neighbours in _search(queries, bank, max(ks), leave_one_out, rank, ranks):
        for row, k in zip(predicted, ks, strict=True):
            row[part] = _vote(values[:, :k], bank_labels[neighbours[:, :k]], temperature, classes)
    if ranks > 1:
        dist.all_reduce(predicted)  # a sum with zeros
    return predicted


def _search(
    queries: Tensor, bank: Tensor, k: int, leave_one_out: bool = False, rank: int = 0, ranks: int = 1
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yield chunks of queries (N, D) with the similarities and places of their nearest in the bank, each (n, k)."""
    bank = F.normalize(bank.float(), dim=1)
    queries = F.normalize(queries.to(bank.device).float(), dim=1)
    rows = max(1, _CHUNK_BYTES // (4 * len(bank)))
    for start in range(rank * rows, len(queries), ranks * rows):
        precision = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("highest")  # training may have allowed TF32
        try:
            similarity = queries[start : start + rows] @ bank.T
        finally:
            torch.set_float32_matmul_precision(precision)
        if leave_one_out:
            similarity.diagonal(start).fill_(-torch.inf)
        yield slice(start, start + rows), *_nearest(similarity, k)


@torch.no_grad()
def nearest_neighbours(queries: Tensor, bank: Tensor, k: int, leave_one_out: bool = False) -> tuple[Tensor, Tensor]:
    """Find similarities and places of the ``k`` nearest bank features, each (N, k).

    With ``leave_one_out`` the queries are the bank, and no feature is its own neighbour.
    """
    found = list(_search(queries, bank, min(k, len(bank) - leave_one_out), leave_one_out))
    return torch.cat([values for _, values, _ in found]), torch.cat([places for _, _, places in found])


def _vote(values: Tensor, labels: Tensor, temperature: float, classes: int) -> Tensor:
    """Return classes (n,), from similarities (n, k) of the nearest and their classes (n, k)."""
    # Relative to the nearest, so that no weight overflows; integers, so that their sum has no order.
    weights = torch.exp((values.double() - values[:, :1].double()) / temperature)
    votes = torch.zeros(len(values), classes, dtype=torch.int64, device=values.device)
    votes.scatter_add_(1, labels, (weights * _ONE_VOTE).round().long())
    return votes.argmax(dim=1)  # the first of equals


def _nearest(similarity: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k largest of each row (n, M) and their columns, each (n, k), of equals the first column first."""
    values, columns = similarity.topk(k, dim=1)
    columns, order = columns.sort(dim=1)
    values, order = values.gather(1, order).sort(dim=1, descending=True, stable=True)
    columns = columns.gather(1, order)
    tied = ((similarity >= values[:, -1:]).sum(dim=1) > k).nonzero().flatten()
    if len(tied):  # topk may have chosen any of the equals
        rows = similarity[tied].sort(dim=1, descending=True, stable=True)
        values[tied], columns[tied] = rows.values[:, :k], rows.indices[:, :k]
    return values, columns
