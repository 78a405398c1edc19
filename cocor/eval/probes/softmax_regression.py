"""Fit softmax regressions for many penalties to convergence, by L-BFGS.

    minimise  sum_i CE(W x_i + b, y_i) + w (|W|^2 + |b|^2)      (AugSelf's objective; Kornblith et al. 2019 and others)

Three things make the grid of penalties fast; none changes the minimum:

    axes          Features are rotated into the eigenbasis of their second moment, which keeps norms. There the Hessian
                  is close to diagonal, curvature * eigenvalue + 2 w, by which L-BFGS is preconditioned; for weak
                  penalties, whose minima are far from zero, by the blocks of each class at the start, where these cost
                  less than they save. If there are fewer images than dimensions, the span of the images is enough.
    batches       Several penalties share every matrix product; those that have converged leave.
    line search   Logits are linear in the weights. So a step needs no pass over the features: Newton's method finds the
                  minimum of the convex function of one number from the logits of the weights and of the direction.

scikit-learn's LogisticRegression minimises the same with ``C = 1 / (2 w)``, a column of ones appended to x and
``fit_intercept=False`` (it never penalises its own intercept).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cocor.eval.probes.batched_lbfgs import PAIRS, Descent, Solution
from loaders.progress import Pulse, track

_AXES = 8192  # dimensions up to which features are rotated; the eigenvalues of more would take minutes
_TOGETHER = 5  # penalties solved at once; with more, the weaker ones would start too far from their minima
_MOST_TOGETHER, _FULL = 15, 2**23  # on a GPU up to so many, if fewer logits than these would not keep it busy
_SLOW = 50  # iterations after which a part of the grid is preconditioned at its start
_MOST_BLOCK_COST, _MOST_BLOCKS = 200, 2**27  # iterations that the preconditioner may cost, and its numbers
_ROWS = 65536  # rotated at a time


@dataclass(frozen=True)
class Fit:
    """Fit's ``weights`` (D + 1, C), the bias last, and the objective ``loss`` there.

    ``gradient``: its norm as a share of that at zero weights; ``converged``: below the tolerance, or no lower float.
    """

    weights: Tensor
    loss: float
    gradient: float
    iterations: int
    converged: bool


class SoftmaxRegression:
    """Problem of features (N, D), on their device, with labels in 0..classes-1."""

    def __init__(self, features: Tensor, labels: Tensor, classes: int) -> None:
        inputs = torch.cat([features, torch.ones_like(features[:, :1])], dim=1)
        self.labels, self.classes = labels.to(features.device), classes
        self._axes, self._moments = _axes(inputs)
        self._inputs = _rotated(inputs, self._axes)
        error = features.new_full((len(features), classes), 1 / classes)
        error.scatter_add_(1, self.labels[:, None], -torch.ones_like(error[:, :1]))
        self._scale = (self._inputs.T @ error).norm().item()  # of the gradient at zero weights

    def objective(self, weights: Tensor, penalty: float) -> float:
        """Return the objective at ``weights`` (D + 1, C), the last row being the bias."""
        rotated = self._axes.T @ weights
        outside = weights.double().square().sum() - rotated.double().square().sum()  # outside the span of the images
        logits = self._inputs @ rotated
        entropy = torch.nn.functional.cross_entropy(logits, self.labels, reduction="none").double().sum()
        return (entropy + penalty * (rotated.double().square().sum() + outside.clamp(min=0))).item()

    def fit(self, penalty: float, start: Tensor | None = None, *, iterations: int = 1000) -> Fit:
        """Fit one penalty as :func:`fit_all` does."""
        return self.fit_all([penalty], start, iterations=iterations)[0]

    @torch.no_grad()
    def fit_all(
        self, penalties: Sequence[float], start: Tensor | None = None, *,
        iterations: int = 1000, tolerance: float = 1e-6,
    ) -> list[Fit]:  # fmt: skip
        """Fit every penalty from ``start`` (default: zero), several at once.

        The strongest come first; the next ones start from the solution of the weakest so far. A fit ends where the
        gradient is ``tolerance`` times that at zero.
        """
        strongest_first = sorted(range(len(penalties)), key=lambda place: -penalties[place])
        rotated = self._inputs.new_zeros(self._inputs.shape[1], self.classes) if start is None else self._axes.T @ start
        together, found, pulse, slow = self._together(), {}, Pulse(), False
        parts = range(0, len(penalties), together)
        for at in track(parts, len(penalties), "solving", "penalties", together, even=False):  # weak ones take longer
            places = strongest_first[at : at + together]
            chosen = [penalties[place] for place in places]
            blocks = slow and self._block_cost(len(places)) <= _MOST_BLOCK_COST
            descent = Descent(self._inputs, self.labels, self._moments, chosen, rotated, blocks)

            def report(done: int, first: int = at + 1, last: int = at + len(places)) -> None:
                pulse.beat(f"solving: penalties {first} to {last} of {len(penalties)}, {done} iterations")

            solutions = descent.run(tolerance * self._scale, iterations, report)
            slow = slow or descent.iterations > _SLOW  # far from zero weights, whose Hessian does not help any more
            for place, solution in zip(places, solutions, strict=True):
                found[place] = self._fit(solution)
                rotated = solution.weights
        return [found[place] for place in range(len(penalties))]

    def _fit(self, solution: Solution) -> Fit:
        gradient = solution.gradient / self._scale if self._scale else 0.0
        return Fit(self._axes @ solution.weights, solution.loss, gradient, solution.iterations, solution.converged)

    def _block_cost(self, penalties: int) -> float:
        """Estimate the cost of the Hessian's blocks in iterations for so many penalties."""
        images, axes = self._inputs.shape
        if self.classes * axes**2 > _MOST_BLOCKS:
            return float("inf")
        return axes * (2 * images + 25 * axes) / (4 * images * penalties)

    def _together(self) -> int:
        """Return how many penalties are solved at once, within the free memory."""
        images, axes = self._inputs.shape
        each = (4 * images + (3 * PAIRS + 8) * axes) * self.classes * self._inputs.element_size()
        room, wanted = 2**31, _TOGETHER
        if self._inputs.is_cuda:
            device = self._inputs.device
            kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
            room = (torch.cuda.mem_get_info(device)[0] + kept) // 2
            wanted = min(_MOST_TOGETHER, max(_TOGETHER, _FULL // (images * self.classes)))
        return max(1, min(wanted, room // each))


def _axes(inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Return orthonormal axes (D, K) that span ``inputs`` (N, D), and the sums of squares (K,) along them.

    They are the eigenvectors and eigenvalues of the second moment, unless there are too many.
    """
    images, dimensions = inputs.shape
    axes: Tensor | None = None
    if images < dimensions:
        axes = torch.linalg.qr(inputs.T.double()).Q
    count = min(images, dimensions)
    moment = torch.zeros(count, count, dtype=torch.float64, device=inputs.device)
    for part in inputs.split(_ROWS):
        part = part.double() if axes is None else part.double() @ axes
        moment += part.T @ part
    if count > _AXES:
        axes = torch.eye(count).to(moment) if axes is None else axes
        return axes.to(inputs), moment.diagonal().to(inputs)
    values, vectors = torch.linalg.eigh(moment)
    return (vectors if axes is None else axes @ vectors).to(inputs), values.clamp(min=0).to(inputs)


def _rotated(inputs: Tensor, axes: Tensor) -> Tensor:
    """Rotate ``inputs`` (N, D) into the basis ``axes`` (D, K): in place if K = D, since a copy would not always fit."""
    if axes.shape[1] < axes.shape[0]:
        return inputs @ axes
    for part in inputs.split(_ROWS):
        part.copy_(part @ axes)
    return inputs
