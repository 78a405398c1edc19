"""Softmax regression on frozen features, to convergence: full-batch L-BFGS with an exact line search.

    minimise  sum_i CE(W x_i + b, y_i) + w (|W|^2 + |b|^2)      (AugSelf's objective; Kornblith et al. 2019 and others)

The logits are linear in the weights. So a line search needs no pass over the features: the logits of the start and of
the direction are enough, and Newton's method finds the minimum of the convex function of one number. An iteration costs
two matrix products, one for the direction's logits and one for the gradient.

scikit-learn's LogisticRegression minimises the same with ``C = 1 / (2 w)``, a column of ones appended to x and
``fit_intercept=False`` (it never penalises its own intercept).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from cocor.eval.lbfgs import Memory

_MEMORY = 50  # pairs that approximate the Hessian
_FLAT = 1e-12  # relative decrease of the objective that counts as none
_FLAT_STEPS = 3
_NEWTON_STEPS = 30


@dataclass(frozen=True)
class Fit:
    """``weights`` (D + 1, C), the last row is the bias. ``loss`` is the objective; ``gradient`` the norm of its
    gradient as a share of that at zero weights; ``converged``: below the tolerance, or no lower float is left."""

    weights: Tensor
    loss: float
    gradient: float
    iterations: int
    converged: bool


class SoftmaxRegression:
    """The problem of features (N, D) with labels (N,) in 0..classes-1, on the features' device and in their dtype."""

    def __init__(self, features: Tensor, labels: Tensor, classes: int) -> None:
        self.inputs = torch.cat([features, torch.ones_like(features[:, :1])], dim=1)
        self.labels = labels.to(features.device)
        self.classes = classes
        self._rows = torch.arange(len(labels), device=features.device)
        at_zero = self.start()
        self._scale = self._gradient(self.inputs @ at_zero, at_zero, 0.0).norm().item()

    def start(self) -> Tensor:
        return self.inputs.new_zeros(self.inputs.shape[1], self.classes)

    def objective(self, weights: Tensor, penalty: float) -> float:
        return self._loss(self.inputs @ weights, weights, penalty).item()

    @torch.no_grad()
    def fit(
        self, penalty: float, start: Tensor | None = None, *, iterations: int = 1000, tolerance: float = 1e-6
    ) -> Fit:
        """Minimise from ``start`` (default: zero) until the gradient is below ``tolerance`` times that at zero."""
        weights = self.start() if start is None else start.clone()
        logits = self.inputs @ weights
        loss = self._loss(logits, weights, penalty)
        gradient = self._gradient(logits, weights, penalty)
        memory = Memory(_MEMORY, weights.numel(), weights)
        flat = done = 0
        norm = gradient.norm().item()
        while norm > tolerance * self._scale and flat < _FLAT_STEPS and done < iterations:
            direction = -memory.times(gradient.flatten()).view_as(gradient)
            if not (gradient * direction).sum() < 0:  # only by rounding: start the memory anew
                memory.clear()
                direction = -gradient
            pull = self.inputs @ direction
            step = self._line_search(logits, pull, weights, direction, penalty)
            weights = weights + step * direction
            # Every now and then anew, so that rounding does not add up.
            logits = self.inputs @ weights if done % 50 == 49 else logits + step * pull
            new_loss = self._loss(logits, weights, penalty)
            new_gradient = self._gradient(logits, weights, penalty)
            memory.add((step * direction).flatten(), (new_gradient - gradient).flatten())
            flat = flat + 1 if (loss - new_loss) <= _FLAT * loss.abs() else 0
            loss, gradient, norm, done = new_loss, new_gradient, new_gradient.norm().item(), done + 1
        converged = norm <= tolerance * self._scale or flat >= _FLAT_STEPS
        return Fit(weights, loss.item(), norm / self._scale if self._scale else 0.0, done, converged)

    def _loss(self, logits: Tensor, weights: Tensor, penalty: float) -> Tensor:
        entropy = logits.logsumexp(1) - logits[self._rows, self.labels]
        return entropy.double().sum() + penalty * weights.double().square().sum()

    def _gradient(self, logits: Tensor, weights: Tensor, penalty: float) -> Tensor:
        error = logits.softmax(1)
        error[self._rows, self.labels] -= 1
        return self.inputs.T @ error + 2 * penalty * weights

    def _line_search(self, logits: Tensor, pull: Tensor, weights: Tensor, direction: Tensor, penalty: float) -> Tensor:
        """The step t >= 0 along ``direction`` where the slope is a hundredth of that at 0 or less: safeguarded Newton.

        The objective is ``sum lse(logits + t pull) - ...`` along the line, whose slope rises with t. Scalars stay on
        the device, so that only one number a Newton step is waited for.
        """
        chosen = pull[self._rows, self.labels].double().sum()
        linear = 2 * penalty * (weights.double() * direction.double()).sum()
        square = 2 * penalty * direction.double().square().sum()
        step, low, high = 1.0, 0.0, float("inf")
        start = 0.0
        for attempt in range(_NEWTON_STEPS + 1):
            at = 0.0 if attempt == 0 else step
            share = (logits + at * pull).softmax(1)
            mean = (share * pull).sum(1)
            slope_curve = torch.stack([
                mean.double().sum() - chosen + linear + at * square,
                ((share * pull.square()).sum(1) - mean.square()).clamp(min=0).double().sum() + square,
            ])  # fmt: skip
            slope, curve = slope_curve.tolist()
            if attempt == 0:
                start = slope
            elif abs(slope) <= 0.01 * abs(start):
                break
            low, high = (at, high) if slope < 0 else (low, at)
            newton = at - slope / curve if curve > 0 else float("inf")
            # Newton's step if it stays inside the bracket, else its middle, or twice as far where there is no end yet.
            outside = not low < newton < high
            step = newton if not outside else (2 * max(at, 1.0) if high == float("inf") else (low + high) / 2)
        return logits.new_tensor(step)
