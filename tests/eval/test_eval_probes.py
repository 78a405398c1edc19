"""Few-shot, retrieval and spectrum: against scikit-learn, by hand on small cases, and on pictures."""

from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.clusters import clusters
from PIL import Image
from sklearn.linear_model import LogisticRegression

from cocor.eval.features import Features
from cocor.eval.probes.fewshot import draw_shots, episodes, logistic_regression, shots
from cocor.eval.probes.retrieval import retrieve, save_sheet
from cocor.eval.probes.spectrum import spectrum
from loaders.datasets.dataset import open_folder
from loaders.errors import UserError


@pytest.mark.parametrize("scale", [0.01, 1.0, 30.0])
def test_the_tasks_classifier_is_liblinears(scale: float) -> None:
    data = clusters(25, 1, classes=5)
    inputs = data.values.double() * scale
    for label in range(5):
        signs = torch.where(data.labels == label, 1.0, -1.0)
        found = logistic_regression(inputs @ inputs.T + 1, signs)
        peer = LogisticRegression(solver="liblinear", C=1.0, tol=1e-10, max_iter=10000).fit(
            inputs.numpy(), signs.numpy()
        )
        weights = inputs.T @ found
        np.testing.assert_allclose(weights.numpy(), peer.coef_[0], atol=2e-4 * max(1.0, np.abs(peer.coef_).max()))
        assert found.sum().item() == pytest.approx(peer.intercept_[0], abs=1e-3)


def test_tasks_are_seeded_and_plausible() -> None:
    data = clusters(200, 2, classes=8)
    found = episodes(data, 1, tasks=300)
    assert 0.3 < found.accuracy < 1 and 0 < found.interval < 0.05
    assert episodes(data, 1, tasks=300) == found  # seeded
    assert episodes(data, 5, tasks=300).accuracy > found.accuracy
    easy = clusters(200, 2, classes=8, spread=0.01)
    assert episodes(easy, 1, tasks=20).accuracy == 1.0
    with pytest.raises(UserError, match="--ways 9"):
        episodes(data, 1, ways=9)


def test_shots_are_drawn_by_class_and_seed() -> None:
    labels = torch.tensor([0, 1] * 10 + [2] * 3)
    drawn = draw_shots(labels, 3, 0)
    assert drawn.shape == (3, 3) and (labels[drawn] == torch.tensor([[0], [1], [2]])).all()
    assert torch.equal(drawn, draw_shots(labels, 3, 0)) and not torch.equal(drawn, draw_shots(labels, 3, 1))
    with pytest.raises(UserError, match="only 3 images"):
        draw_shots(labels, 4, 0)


@pytest.mark.parametrize("count", [1, 5])
def test_more_shots_and_five_seeds(count: int) -> None:
    found = shots(clusters(120, 3), clusters(150, 4), count)
    assert len(found.top1) == 5 and found.converged and "5 seeds" in found.lines()[0]
    assert min(found.top1) > 1 / 6


def test_the_spectrum_counts_dimensions() -> None:
    generator = torch.Generator().manual_seed(0)
    basis = torch.linalg.qr(torch.randn(16, 16, generator=generator))[0]
    flat = torch.randn(4000, 3, generator=generator) @ basis[:3]
    labels = torch.zeros(4000, dtype=torch.int64)
    low = spectrum("low", Features(flat, labels), normalise=False)
    full = spectrum("full", Features(torch.randn(4000, 16, generator=generator), labels))
    assert low.effective_rank == pytest.approx(3, abs=0.05) and low.components_90 == 3
    assert full.effective_rank == pytest.approx(16, abs=0.1)
    numpy_values = np.linalg.svd(flat.numpy() - flat.numpy().mean(0), compute_uv=False) / 4000**0.5
    np.testing.assert_allclose(low.singular_values[:3], numpy_values[:3], rtol=1e-4)
    collapsed = spectrum("point", Features(torch.ones(10, 4), torch.zeros(10)))
    assert collapsed.effective_rank == pytest.approx(0, abs=1.1)
    with pytest.raises(UserError):
        spectrum("one", Features(torch.ones(1, 4), torch.zeros(1)))


def test_retrieval_finds_and_shows_the_nearest(photo_folder: Path, tmp_path: Path) -> None:
    dataset = open_folder(photo_folder)
    values = torch.nn.functional.one_hot(torch.from_numpy(dataset.labels), 4).float()
    features = Features(values + 0.01 * torch.randn(24, 4), torch.from_numpy(dataset.labels))
    found = retrieve(features, features, rows=3, k=4)
    assert found.precision == 1.0 and found.neighbours.shape == (3, 4)
    assert (found.similarities.diff(dim=1) <= 0).all()
    save_sheet(tmp_path / "sheet.png", found, dataset, dataset)
    sheet = Image.open(tmp_path / "sheet.png")
    assert sheet.width > 5 * 128 and sheet.height > 3 * 128
    assert found.plain(dataset, dataset)["rows"][0]["query"] in dataset.names


def test_unlabelled_queries_have_no_precision() -> None:
    bank = clusters(20, 1)
    found = retrieve(Features(bank.values, torch.full((20,), -1)), bank, rows=3, k=4)
    assert found.precision is None and found.lines() == ["the queries have no labels, so there is no precision"]
