"""The probe's refit once more, by this package and by scikit-learn, to compare their minima and times."""

import time
from collections.abc import Callable
from typing import TypeVar

import torch

from cocor.eval.features import Features
from cocor.eval.probes.softmax_regression import SoftmaxRegression
from loaders.errors import UserError
from loaders.progress import patience

Result = TypeVar("Result")

_ITERATIONS = 5000  # at most


def check_peer(classes: int) -> None:
    """UserError if scikit-learn is missing, or solves another problem: of two classes it fits one weight vector."""
    try:
        import sklearn.linear_model  # noqa: F401
    except ImportError:
        raise UserError("--against-sklearn needs scikit-learn: pip install scikit-learn") from None
    if classes < 3:  # for two it penalises only the difference of their weights
        raise UserError("--against-sklearn needs three classes or more")


def against_sklearn(data: Features, penalty: float, device: torch.device | str) -> dict:
    """Both solve the same objective on ``data`` from zero, in float64: objectives, their difference for each image, and
    seconds. scikit-learn works on the CPU.

    Raises:
        UserError: scikit-learn is not installed, or there are fewer than three classes.
    """
    data = data.labelled().flat()
    check_peer(len(data.labels.unique()))
    from sklearn.linear_model import LogisticRegression

    values = data.values.double()
    values = values / values.square().mean().sqrt().clamp(min=1e-30)
    classes, labels = data.labels.unique(return_inverse=True)
    values = values.to(device)
    fit, seconds = _timed(lambda: SoftmaxRegression(values, labels, len(classes)).fit(penalty, iterations=_ITERATIONS))
    here = SoftmaxRegression(values, labels, len(classes))
    there = LogisticRegression(C=1 / (2 * penalty), fit_intercept=False, max_iter=_ITERATIONS, tol=1e-8)
    inputs = torch.cat([values, torch.ones_like(values[:, :1])], dim=1).cpu().numpy()
    with patience("scikit-learn fits on the CPU"):
        _, their_seconds = _timed(lambda: there.fit(inputs, labels.numpy()))
    weights = torch.from_numpy(there.coef_.T.copy()).to(device)
    theirs = here.objective(weights, penalty)
    return {
        "penalty": penalty,
        "objective": fit.loss,
        "objective_sklearn": theirs,
        "difference_per_image": (fit.loss - theirs) / len(data),
        "relative_difference": (fit.loss - theirs) / max(abs(theirs), 1e-30),
        "seconds": seconds,
        "seconds_sklearn": their_seconds,
        "iterations": fit.iterations,
        "iterations_sklearn": int(max(there.n_iter_)),
    }


def _timed(work: Callable[[], Result]) -> tuple[Result, float]:
    began = time.perf_counter()
    result = work()
    return result, time.perf_counter() - began
