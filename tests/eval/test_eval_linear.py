"""The probe solves its objective as scikit-learn does, ignores the scale of features, and tests once."""

import numpy as np
import pytest
import torch
from helpers.clusters import clusters
from torch import Tensor

from cocor.eval.datasets.protocols import RECIPES, SgdSettings
from cocor.eval.features import Features
from cocor.eval.probes.linear import PENALTIES, class_mean, linear_probe, top1
from cocor.eval.probes.sgd import sgd_probe, shortened
from cocor.eval.probes.softmax_regression import SoftmaxRegression
from loaders.errors import UserError


def sklearns_minimum(problem: SoftmaxRegression, values: Tensor, labels: Tensor, penalty: float) -> float:
    """The objective where scikit-learn finds its minimum."""
    linear_model = pytest.importorskip("sklearn.linear_model")
    peer = linear_model.LogisticRegression(C=1 / (2 * penalty), fit_intercept=False, max_iter=20000, tol=1e-10)
    peer.fit(torch.nn.functional.pad(values.double(), (0, 1), value=1.0).numpy(), labels.numpy())
    return problem.objective(torch.from_numpy(np.ascontiguousarray(peer.coef_.T)), penalty)


@pytest.mark.parametrize("penalty", [1e-4, 1e-2, 1.0, 100.0])
def test_it_reaches_scikit_learns_minimum(penalty: float) -> None:
    data = clusters(400, 1)
    problem = SoftmaxRegression(data.values.double(), data.labels, 6)
    fit, theirs = problem.fit(penalty), sklearns_minimum(problem, data.values, data.labels, penalty)
    assert fit.converged and abs(fit.loss - theirs) <= 1e-4 * max(1.0, theirs)
    assert fit.loss <= theirs * (1 + 1e-9) + 1e-9
    torch.testing.assert_close(fit.loss, problem.objective(fit.weights, penalty), rtol=1e-10, atol=1e-9)


def test_joint_fits_equal_single_fits() -> None:
    data = clusters(300, 20)
    problem = SoftmaxRegression(data.values.double(), data.labels, 6)
    penalties = PENALTIES[16::3]
    for penalty, fit in zip(penalties, problem.fit_all(penalties), strict=True):
        alone = problem.fit(penalty)
        assert fit.converged and alone.converged
        assert fit.loss == pytest.approx(alone.loss, rel=1e-6, abs=1e-5)
        assert fit.loss == pytest.approx(problem.objective(fit.weights, penalty), rel=1e-9)


def test_rank_deficient_inputs_reach_the_minimum() -> None:
    data = clusters(30, 21, dim=80)
    values = torch.cat([data.values, data.values[:5]]).double()  # rank 30 of 35 images, 81 dimensions
    labels = torch.cat([data.labels, data.labels[:5]])
    problem = SoftmaxRegression(values, labels, 6)
    fit = problem.fit(0.01)
    theirs = sklearns_minimum(problem, values, labels, 0.01)
    assert fit.converged and fit.loss == pytest.approx(theirs, rel=1e-5)
    assert problem.objective(fit.weights, 0.01) == pytest.approx(fit.loss, rel=1e-9)
    assert problem.fit(0.01, fit.weights).iterations == 0


def test_the_report_names_unfinished_penalties() -> None:
    found = linear_probe(clusters(60, 8), clusters(60, 9), clusters(60, 10), penalties=[1e-6, 1e-4, 1e3], iterations=9)
    assert [trial.converged for trial in found.trials] == [False, False, True]
    assert "2 fits of the grid stopped unfinished at the iteration limit, penalties 1e-06 to " in found.lines()[-1]


@pytest.mark.parametrize("scale", [1e-3, 1e3])
def test_accuracy_ignores_the_features_scale(scale: float) -> None:
    splits = [clusters(n, seed) for n, seed in ((300, 5), (100, 6), (500, 7))]
    plain = linear_probe(*splits, penalties=PENALTIES[::4])
    scaled = linear_probe(*(Features(s.values * scale, s.labels) for s in splits), penalties=PENALTIES[::4])
    assert scaled.top1 == pytest.approx(plain.top1, abs=1e-3) and scaled.penalty == plain.penalty


def test_penalty_from_val_and_refit_on_both() -> None:
    train, val, test = clusters(60, 8), clusters(60, 9), clusters(400, 10)
    found = linear_probe(train, val, test, penalties=PENALTIES[::3])
    best = max(found.trials, key=lambda trial: trial.top1)
    assert found.penalty == best.penalty and found.converged
    both = Features(torch.cat([train.values, val.values]), torch.cat([train.labels, val.labels]))
    values = both.values.double() / train.values.double().square().mean().sqrt()
    expected = SoftmaxRegression(values, both.labels, 6).fit(found.penalty)
    assert found.loss == pytest.approx(expected.loss, rel=1e-6, abs=1e-4)
    assert linear_probe(both, val, test, penalties=[1e5]).penalty == 1e5  # nothing else is looked at


def test_metrics_by_hand() -> None:
    labels, predicted = torch.tensor([0, 0, 0, 2, 2, 5]), torch.tensor([0, 0, 1, 2, 0, 5])
    assert top1(predicted, labels) == pytest.approx(4 / 6)
    assert class_mean(predicted, labels) == pytest.approx((2 / 3 + 1 / 2 + 1) / 3)


def test_ten_crops_count_ten_and_unlabelled_none() -> None:
    train, val, test = clusters(60, 11), clusters(40, 12), clusters(50, 13)
    ten = Features(train.values[:, None].repeat(1, 10, 1), train.labels)
    labels: Tensor = test.labels.clone()
    labels[:5] = -1
    found = linear_probe(ten, val, Features(test.values, labels), penalties=[1.0])
    assert (found.train, found.val, found.test) == (600, 40, 45)


def test_useless_splits_are_refused() -> None:
    data = clusters(20, 14)
    one = Features(data.values, torch.zeros(20, dtype=torch.int64))
    none = Features(data.values, torch.full((20,), -1))
    for splits, message in [((one, one, one), "1 class"), ((data, none, data), "validation split"),
                            ((one.subset(torch.arange(3)), data, data), "1 class")]:  # fmt: skip
        with pytest.raises(UserError, match=message):
            linear_probe(*splits, penalties=[1.0])
    with pytest.raises(UserError, match="test split has a class"):
        linear_probe(data, data, Features(data.values, data.labels + 3), penalties=[1.0])


@pytest.mark.parametrize("recipe", ["moco", "simsiam"])
def test_the_sgd_probes_learn(recipe: str) -> None:
    train, test = clusters(600, 15), clusters(300, 16)
    settings = RECIPES[recipe]  # type: ignore[index]
    small = SgdSettings(settings.lr, 64, 80, tuple(at * 8 // 10 for at in settings.steps_at), settings.trust)
    found = sgd_probe(train, test, small)
    full = linear_probe(train, test, test, penalties=[1.0])
    assert found.top1 > 0.75 * full.top1


def test_recipes_are_the_sources() -> None:
    assert len(PENALTIES) == 45 and PENALTIES[0] == pytest.approx(1e-6) and PENALTIES[-1] == pytest.approx(1e5)
    assert shortened(RECIPES["moco"], 10) == SgdSettings(30.0, 256, 10, (6, 8))
    assert RECIPES["moco"] == SgdSettings(30.0, 256, 100, (60, 80), 0.0)
    assert RECIPES["simsiam"] == SgdSettings(1.6, 4096, 90, (), 0.001)


@pytest.mark.gpu
def test_a_gpu_finds_the_same_minimum() -> None:
    train, val, test = clusters(300, 17), clusters(100, 18), clusters(400, 19)
    here, there = (
        linear_probe(train, val, test, penalties=PENALTIES[::4], device=device) for device in ("cpu", "cuda")
    )
    assert there.penalty == here.penalty and there.loss == pytest.approx(here.loss, rel=1e-6, abs=1e-4)
    assert there.top1 == pytest.approx(here.top1, abs=0.005)
