"""What is measured while a run trains: right numbers, the best checkpoint, curves that go on."""

import math
from pathlib import Path

import pytest
import torch
from helpers.runs import STEPS, Capture, assert_same_bits, final_state, flags, metrics
from sklearn.linear_model import LogisticRegression

from cocor import checkpoint
from cocor.eval.probes.geometry import alignment, rankme, uniformity
from cocor.eval.probes.online import _PENALTY, linear_accuracy
from cocor.train import main


def test_the_probe_fits_as_scikit_learn_does() -> None:
    torch.manual_seed(0)
    labels, others = torch.arange(300) % 3, torch.arange(90) % 3
    centres = torch.randn(3, 8)
    train, test = (centres[index] + 1.5 * torch.randn(len(index), 8) for index in (labels, others))
    scaled = (train - train.mean(0)) / train.std(0)
    with_ones = torch.cat([scaled, torch.ones(len(scaled), 1)], 1)
    reference = LogisticRegression(C=1 / (2 * _PENALTY * len(train)), fit_intercept=False, max_iter=1000, tol=1e-6)
    expected = reference.fit(with_ones, labels).score(with_ones, labels)
    found = linear_accuracy(train, labels, test, others)
    assert found["train_accuracy"] == pytest.approx(expected, abs=0.005) and 0.5 < found["accuracy"] < 1


def test_geometry_of_known_features() -> None:
    assert rankme(torch.linalg.qr(torch.randn(40, 6)).Q) == pytest.approx(6, rel=1e-4)
    assert rankme(torch.ones(5, 7)) == pytest.approx(1, abs=1e-3)
    corners = torch.tensor([[1.0, 0.0], [0.0, 3.0], [-2.0, 0.0]])  # their squared distances are 2, 4 and 2
    assert uniformity(corners) == pytest.approx(math.log((2 * math.exp(-4) + math.exp(-8)) / 3))
    assert alignment(torch.stack([corners, corners.roll(1, 0)])) == pytest.approx((4 + 2 + 2) / 3)


def test_a_run_is_measured_and_keeps_its_best(photo_folder: Path, tmp_path: Path, capsys: Capture) -> None:
    """Measuring changes no weight, and a resumed run remembers the best."""
    shared = {"data": photo_folder, "val_data": photo_folder, "loader": "torch"}
    assert main(flags(**shared, knn_every=0, output=tmp_path / "plain")) == 0
    watched = flags(**shared, probe_every=1, keep_best="probe", output=tmp_path / "run")
    assert main(watched) == 0
    assert_same_bits(final_state(tmp_path / "run"), final_state(tmp_path / "plain"))
    accuracies = {line["step"]: line["accuracy"] for line in metrics(tmp_path / "run", "probe")}
    assert list(accuracies) == [0, STEPS, 2 * STEPS]
    assert metrics(tmp_path / "run", "knn")[0].keys() >= {"rankme", "alignment", "uniformity"}
    best = checkpoint.load(tmp_path / "run/checkpoints/best.pt")
    assert best["best"] == max(accuracies[step] for step in (STEPS, 2 * STEPS)) == accuracies[best["step"]]
    before = (tmp_path / "run/checkpoints/best.pt").read_bytes()
    first, last = (tmp_path / f"run/checkpoints/step_{epochs * STEPS:07d}.pt" for epochs in (1, 2))
    knn = {line["step"]: line["accuracy"] for line in metrics(tmp_path / "run", "knn")}
    assert checkpoint.load(first)["best_knn"][0] == max(knn[0], knn[STEPS])
    checkpoint.write(checkpoint.load(first) | {"best_knn": [1.0, 1]}, first)
    last.unlink()
    assert main([*watched, "--resume"]) == 0
    assert checkpoint.load(last)["best_knn"] == [1.0, 1]
    assert len(metrics(tmp_path / "run", "probe")) == 3
    assert (tmp_path / "run/checkpoints/best.pt").read_bytes() == before
    assert main(flags(**shared, keep_best="probe", output=tmp_path / "no")) == 2
    assert "--keep-best probe needs --probe-every above 0" in capsys.readouterr().err
