"""k-NN equals a slow transcription, does not depend on chunks or order, and is honest about what it could not do."""

import math
import subprocess
import sys

import pytest
import torch
from helpers.runs import environment
from torch import Tensor

from cocor.eval.probes import knn
from cocor.eval.probes.knn import KnnResult, knn_accuracy, knn_predict


def literal(queries: Tensor, bank: Tensor, labels: Tensor, k: int, temperature: float, skip_self: bool) -> list[int]:
    """Wu et al., section 3.4, with loops."""
    result = []
    for row, query in enumerate(queries):
        scored = []
        for column, entry in enumerate(bank):
            if not (skip_self and row == column):
                scored.append((float(query @ entry / query.norm() / entry.norm()), column))
        scored.sort(key=lambda pair: (-pair[0], pair[1]))
        votes: dict[int, float] = {}
        for similarity, column in scored[:k]:
            votes[int(labels[column])] = votes.get(int(labels[column]), 0.0) + math.exp(similarity / temperature)
        result.append(max(sorted(votes), key=lambda label: votes[label]))
    return result


def features(count: int, classes: int = 5, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes, (count,), generator=generator)
    centres = torch.randn(classes, 8, generator=torch.Generator().manual_seed(9))
    return centres[labels] + 1.5 * torch.randn(count, 8, generator=generator), labels


@pytest.mark.parametrize("leave_one_out", [False, True])
def test_it_equals_a_literal_transcription(leave_one_out: bool) -> None:
    bank, labels = features(120)
    queries = bank if leave_one_out else features(40, seed=1)[0]
    for k in (1, 7, 60, 500):
        (found,) = knn_predict(queries, bank, labels, [k], temperature=0.07, leave_one_out=leave_one_out)
        assert found.tolist() == literal(queries, bank, labels, k, 0.07, leave_one_out)


def by_all_others(bank: Tensor, labels: Tensor, k: int = 200) -> KnnResult:
    return knn.knn_curve(bank, labels, bank, labels, [k], leave_one_out=True)[0]


def test_one_search_serves_every_k(monkeypatch: pytest.MonkeyPatch) -> None:
    bank, labels = features(120)
    bank = torch.cat([bank, bank[:60]])  # equal neighbours
    labels = torch.cat([labels, labels[:60].flip(0)])
    queries, query_labels = features(40, seed=1)
    ks = [1, 2, 3, 10, 500]
    found = knn.knn_curve(queries, query_labels, bank, labels, ks)
    assert found == [knn_accuracy(queries, query_labels, bank, labels, k=k) for k in ks]
    alone = knn.knn_curve(bank, labels, bank, labels, ks, leave_one_out=True)
    assert alone == [by_all_others(bank, labels, k=k) for k in ks]
    monkeypatch.setattr(knn, "_CHUNK_BYTES", 4 * 180 * 7)  # in chunks of 7 queries
    assert knn.knn_curve(bank, labels, bank, labels, ks, leave_one_out=True) == alone


def test_ties_go_to_the_first_in_the_bank() -> None:
    direction = torch.tensor([[1.0, 0.0]])
    bank = torch.cat([direction.repeat(50, 1), torch.tensor([[0.0, 1.0]])])
    labels = torch.tensor([3, 3, *([1] * 48), 0])
    for k, label in ((2, 3), (4, 1), (5, 1)):  # of 4, two votes each: the lower class
        assert knn_predict(direction, bank, labels, [k], temperature=0.07).item() == label
    bank, labels = torch.ones(100, 4), torch.arange(100) % 10  # collapsed
    first, again = (knn_accuracy(bank, labels, bank, labels, k=15) for _ in range(2))
    assert first == again and first.accuracy == 0.1
    assert knn_accuracy(torch.zeros(10, 4), labels[:10], torch.zeros(9, 4), labels[:9], k=3).accuracy == 0.1


def test_k_is_clipped_to_the_bank_with_a_note() -> None:
    bank, labels = features(30)
    result = knn_accuracy(*features(10, seed=1), bank, labels, k=200)
    assert (result.k, result.note) == (30, "k = 200 is more than the bank holds; used 30")
    assert by_all_others(bank, labels, k=200).k == 29
    assert knn_accuracy(*features(10, seed=1), bank, labels, k=30).note == ""


def test_unlabelled_do_not_count_nor_nan() -> None:
    bank, labels = features(60)
    queries, query_labels = features(20, seed=1)
    plain = knn_accuracy(queries, query_labels, bank, labels, k=10)
    more_bank, more_labels = torch.cat([queries, bank]), torch.cat([torch.full((20,), -1), labels])
    asked = torch.cat([queries, bank]), torch.cat([query_labels, torch.full((60,), -1)])
    assert knn_accuracy(*asked, more_bank, more_labels, k=10) == plain
    with pytest.raises(ValueError, match="labelled"):
        knn_accuracy(queries, query_labels, bank, torch.full((60,), -1))
    bank[3, 1] = float("nan")
    with pytest.raises(ValueError, match="not finite"):
        by_all_others(bank, labels)


def test_half_precision_is_compared_in_float32() -> None:
    torch.set_float32_matmul_precision("high")
    try:
        bank, labels = features(60)
        queries, query_labels = features(20, seed=1)
        half = knn_accuracy(queries.bfloat16(), query_labels, bank.bfloat16(), labels, k=10)
        again = knn_accuracy(queries.bfloat16().float(), query_labels, bank.bfloat16().float(), labels, k=10)
        assert half == again
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision("highest")


_RANK = """
import torch, torch.distributed as dist
from cocor.eval.probes import knn
knn._CHUNK_BYTES = 4 * 300 * 16
g = torch.Generator().manual_seed(0)
bank, labels = torch.randn(300, 8, generator=g), torch.arange(300) % 7
def found():
    alone = knn.knn_curve(bank, labels, bank, labels, [5], leave_one_out=True)
    return knn.knn_curve(bank[:100], labels[:100], bank, labels, [1, 9]), alone
one = found()
dist.init_process_group("gloo")
assert found() == one
dist.barrier()  # a rank whose peer has gone may abort
dist.destroy_process_group()
"""


def test_ranks_share_the_chunks() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python"]
    command += [sys.executable, "-c", _RANK]
    found = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=300)
    assert found.returncode == 0, found.stderr[-2000:]


@pytest.mark.gpu
def test_a_gpu_gives_the_same_result() -> None:
    bank, labels = features(5000, classes=50)
    queries, _ = features(1000, classes=50, seed=1)
    cpu = knn_predict(queries, bank, labels, [200], temperature=0.07)
    gpu = [knn_predict(queries.cuda(), bank.cuda(), labels.cuda(), [200], temperature=0.07).cpu() for _ in range(3)]
    assert torch.equal(gpu[0], gpu[1]) and torch.equal(gpu[0], gpu[2])
    assert (gpu[0] == cpu).float().mean() > 0.995
