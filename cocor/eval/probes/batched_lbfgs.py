"""Minimise softmax regressions that differ in their penalty by L-BFGS, together.

    gradient -> memory -> direction -> its logits -> line search -> weights, logits, gradient

``P`` problems, ``N`` images, ``K`` axes of the features, ``C`` classes: weights are (P, K, C), logits (N, P, C). An
iteration is two matrix products for all problems, and the host waits for the device twice: for the end of the line
search, and to see which problems are done.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

PAIRS = 50  # that approximate a Hessian
_FLAT = 1e-12  # a relative decrease of the objective that counts as none
_FLAT_STEPS = 3  # steps without a decrease after which a problem has converged
_MOST_EVALUATIONS = 30  # of one line search
_SLOPE = 0.1  # a line search ends when the slope has fallen to this share of the first
_NEAR = 0.01  # or when the step would change by less than this share
_RECOMPUTE = 50  # iterations after which logits are computed from the weights, so that rounding does not add up
_FLOOR = 0.001  # share of the curvature at zero weights that an image keeps, however sure the start is of it
_CROWDED = 0.75  # solved problems are dropped when no more than this share is open
_BLOCK = {"cpu": 2**17, "cuda": 2**25}  # logits per block of an evaluation: what fits caches, or memory


@dataclass(frozen=True)
class Solution:
    """Minimum ``weights`` (K, C), its objective and the norm of its ``gradient``."""

    weights: Tensor
    loss: float
    gradient: float
    iterations: int
    converged: bool


class Descent:
    """Descent of inputs (N, K) with labels in 0..C-1, for each of ``penalties``.

    ``moments`` (K,): second moments along the axes of ``inputs``. All start at ``start`` (K, C), preconditioned
    by the Hessian at zero weights or, if ``blocks``, by its block of every class at ``start``.
    """

    def __init__(
        self, inputs: Tensor, labels: Tensor, moments: Tensor, penalties: Sequence[float], start: Tensor,
        blocks: bool = False,
    ) -> None:  # fmt: skip
        self._inputs, self._labels = inputs, labels
        self._places = list(range(len(penalties)))
        self._penalties = torch.tensor(penalties, dtype=torch.float64, device=inputs.device)
        self._weights = start.expand(len(penalties), *start.shape).clone()
        self._logits = self._logits_of(self._weights)
        self._error = torch.empty_like(self._logits)
        none = torch.zeros_like(self._penalties)
        self._loss = self._evaluate(None, none)[0] + self._penalties * _dot(self._weights, self._weights)
        self._gradient = self._gradient_here()
        classes = start.shape[1]
        # At zero weights the Hessian is its diagonal, since axes do not correlate there.
        curvature = moments.double()[:, None] * (1 - 1 / classes) / classes  # (K, 1)
        self._turned: Tensor | None = None  # (C, K, K): each class's own axes, as columns
        if blocks:
            share = self._logits[:, 0].softmax(1)
            floor = _FLOOR * (1 - 1 / classes) / classes
            weighted = (inputs.T @ (inputs * one[:, None]) for one in (share * (1 - share)).clamp(min=floor).T)
            values, self._turned = torch.linalg.eigh(torch.stack(list(weighted)))
            curvature = values.clamp(min=0).T.double()  # (K, C)
        self._root = (curvature + 2 * self._penalties[:, None, None]).sqrt().to(inputs)  # (P, K, 1) or (P, K, C)
        self._memory = Memory(PAIRS, len(penalties), start.numel(), start)
        self._flat = none.long()
        self.iterations = 0

    def run(
        self, tolerance: float, iterations: int, after_each: Callable[[int], None] = lambda _: None
    ) -> list[Solution]:
        """Descend until gradients are ``tolerance`` or less, or objectives stay.

        Makes at most ``iterations`` and calls ``after_each`` with the number done. Returns a solution for every
        penalty, in their order.
        """
        found: list[Solution | None] = [None] * len(self._places)
        while True:
            norms = self._gradient.flatten(1).norm(dim=1).double()
            converged = (norms <= tolerance) | (self._flat >= _FLAT_STEPS)
            table = torch.stack([converged.double(), norms, self._loss]).tolist()
            done = [bool(value) or self.iterations >= iterations for value in table[0]]
            for at, place in enumerate(self._places):
                if done[at] and found[place] is None:
                    found[place] = Solution(
                        self._weights[at].clone(), table[2][at], table[1][at], self.iterations, bool(table[0][at])
                    )
            open_ones = [at for at, place in enumerate(self._places) if found[place] is None]
            if not open_ones:
                return [solution for solution in found if solution is not None]
            if len(open_ones) <= _CROWDED * len(self._places):
                self._keep(open_ones)
            self._iterate()
            after_each(self.iterations)

    def _iterate(self) -> None:
        direction, slope = self._direction()
        pull = self._logits_of(direction)
        step, entropy = self._line_search(direction, pull, slope)
        moved = step.to(direction)[:, None, None] * direction
        self._weights += moved
        self.iterations += 1
        if self.iterations % _RECOMPUTE:
            self._logits.addcmul_(step.to(pull)[:, None], pull)
        else:
            self._logits = self._logits_of(self._weights)
        loss = entropy + self._penalties * _dot(self._weights, self._weights)
        gradient = self._gradient_here()
        step_there, change_there = self._turn(moved) * self._root, self._turn(gradient - self._gradient) / self._root
        self._memory.add(step_there.flatten(1), change_there.flatten(1))
        self._flat = torch.where(self._loss - loss <= _FLAT * self._loss.abs(), self._flat + 1, 0)
        self._loss, self._gradient = loss, gradient

    def _direction(self) -> tuple[Tensor, Tensor]:
        """Return the descent directions (P, K, C) and the objectives' slopes (P,) along them."""
        scaled = self._turn(self._gradient) / self._root
        direction = self._turn(-self._memory.times(scaled.flatten(1)).view_as(scaled) / self._root, back=True)
        downhill = _dot(self._gradient, direction) < 0  # always, but for rounding
        direction = torch.where(downhill[:, None, None], direction, self._turn(-scaled / self._root, back=True))
        return direction, _dot(self._gradient, direction)

    def _turn(self, weights: Tensor, back: bool = False) -> Tensor:
        """Express ``weights`` (P, K, C) in the axes of the preconditioner, or ``back`` in those of the inputs."""
        if self._turned is None:
            return weights
        axes = self._turned if back else self._turned.mT
        return (axes @ weights.permute(2, 1, 0)).permute(2, 1, 0).contiguous()

    def _line_search(self, direction: Tensor, pull: Tensor, first: Tensor) -> tuple[Tensor, Tensor]:
        """Return steps (P,) near the minima along ``direction``, by safeguarded Newton, and the cross entropies there.

        ``pull`` (N, P, C): the logits of ``direction``; ``first`` (P,): the slopes at step 0. Since the objective is
        convex, the slope rises with the step.
        """
        linear = 2 * self._penalties * _dot(self._weights, direction)
        square = 2 * self._penalties * _dot(direction, direction)
        low, high = torch.zeros_like(first), torch.full_like(first, float("inf"))
        proposal = torch.ones_like(first)
        for _ in range(_MOST_EVALUATIONS):
            step = proposal
            entropy, slope, curve = self._evaluate(pull, step)
            slope, curve = slope + linear + step * square, curve + square
            newton = torch.where(curve > 0, step - slope / curve, float("inf"))
            settled = (slope.abs() <= _SLOPE * first.abs()) | ((newton - step).abs() <= _NEAR * step)
            if settled.all():
                break
            low, high = torch.where(slope < 0, step, low), torch.where(slope < 0, high, step)
            # Newton's step inside the bracket, else its middle, or twice as far where there is no end yet.
            middle = torch.where(high.isinf(), 2 * step.clamp(min=1), (low + high) / 2)
            proposal = torch.where((low < newton) & (newton < high), newton, middle)
            proposal = torch.where(settled, step, proposal)
        return step, entropy

    def _evaluate(self, pull: Tensor | None, step: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return cross entropies (P,) of the logits plus ``step`` (P,) times ``pull``, their slopes and curvatures.

        Leaves softmax minus one-hot labels (N, P, C) in ``_error``.
        """
        totals = self._penalties.new_zeros(3, len(self._penalties))
        along = step.to(self._logits)[:, None]
        rows = max(1, _BLOCK.get(self._logits.device.type, 2**20) // self._logits[0].numel())
        for start in range(0, len(self._logits), rows):
            part = slice(start, start + rows)
            pulled = None if pull is None else pull[part]
            logits = self._logits[part] if pulled is None else self._logits[part] + along * pulled
            truth = self._labels[part, None, None].expand(len(logits), logits.shape[1], 1)
            logarithms = logits.log_softmax(2)
            totals[0] -= logarithms.gather(2, truth)[..., 0].sum(0, dtype=torch.float64)
            share = torch.exp(logarithms, out=self._error[part])
            if pulled is not None:
                weighted = share * pulled
                mean = weighted.sum(2)
                totals[1] += (mean - pulled.gather(2, truth)[..., 0]).sum(0, dtype=torch.float64)
                totals[2] += (weighted.mul_(pulled).sum(2) - mean.square()).clamp_(min=0).sum(0, dtype=torch.float64)
            share.scatter_add_(2, truth, -torch.ones_like(truth, dtype=share.dtype))
        return totals[0], totals[1], totals[2]

    def _gradient_here(self) -> Tensor:
        found = self._inputs.T @ self._error.flatten(1)
        found = found.view(found.shape[0], len(self._penalties), -1).transpose(0, 1)
        return found + 2 * self._penalties.to(found)[:, None, None] * self._weights

    def _logits_of(self, weights: Tensor) -> Tensor:
        return (self._inputs @ weights.transpose(0, 1).flatten(1)).view(len(self._inputs), len(weights), -1)

    def _keep(self, places: list[int]) -> None:
        """Drop all problems but those at ``places``."""
        chosen = torch.tensor(places, device=self._penalties.device)
        self._places = [self._places[place] for place in places]
        self._penalties, self._weights = self._penalties[chosen], self._weights[chosen]
        self._logits = self._logits[:, chosen]
        self._error = torch.empty_like(self._logits)
        self._gradient, self._root = self._gradient[chosen], self._root[chosen]
        self._loss, self._flat = self._loss[chosen], self._flat[chosen]
        self._memory.keep(chosen)


def _dot(first: Tensor, second: Tensor) -> Tensor:
    """Return the inner products (P,) in float64."""
    return (first * second).flatten(1).sum(1, dtype=torch.float64)


class Memory:
    """Memory of L-BFGS for many problems, in compact form: two products a direction.

    Holds up to ``pairs`` pairs of vectors of length ``size`` for each of ``problems``, like ``like``. With steps ``s``
    and changes of the gradient ``y`` as rows of S and Y, R the upper triangle of S Y^T, D its diagonal and gamma =
    s.y / y.y of the newest pair, the approximate inverse Hessian is (Byrd, Nocedal & Schnabel 1994, equation 3.1)

        H g = gamma g + S^T v - gamma Y^T u,    u = R^-1 S g,    v = R^-T ((D + gamma Y Y^T) u - gamma Y g)
    """

    # The usual two-loop recursion would launch hundreds of small kernels an iteration and problem.

    def __init__(self, pairs: int, problems: int, size: int, like: Tensor) -> None:
        self._pairs = pairs
        self._steps, self._changes = like.new_zeros(2, problems, pairs, size)
        self._products = torch.zeros(problems, pairs, pairs, dtype=torch.float64, device=like.device)  # S Y^T
        self._squares = torch.zeros_like(self._products)  # Y Y^T
        self._gamma = torch.ones(problems, 1, dtype=torch.float64, device=like.device)
        self._added = self._known = 0

    def keep(self, problems: Tensor) -> None:
        """Forget all but these problems."""
        self._steps, self._changes = self._steps[problems], self._changes[problems]
        self._products, self._squares = self._products[problems], self._squares[problems]
        self._gamma = self._gamma[problems]

    def add(self, step: Tensor, change: Tensor) -> None:
        """Add a pair (problems, size) in the place of the oldest."""
        product = (step * change).sum(1, keepdim=True).double()
        useful = product > 0  # else rounding has spoilt the pair; zeros have no effect
        self._gamma = torch.where(useful, product / change.square().sum(1, keepdim=True).double(), self._gamma)
        place = self._added % self._pairs
        self._added += 1
        self._known = min(self._added, self._pairs)
        self._steps[:, place], self._changes[:, place] = step * useful, change * useful
        along, across = self._times(self._changes[:, place])
        self._products[:, : self._known, place] = along
        self._products[:, place, place] = torch.where(useful, product, 1.0)[:, 0]  # zeros could not be solved for
        self._squares[:, place, : self._known] = self._squares[:, : self._known, place] = across

    def times(self, gradient: Tensor) -> Tensor:
        """Multiply ``gradient`` (problems, size) with the approximate inverse Hessians."""
        if not self._added:
            return gradient
        known = self._known
        oldest = self._added % self._pairs if known == self._pairs else 0

        def by_age(table: Tensor) -> Tensor:
            axes = tuple(range(1, table.ndim))
            return table[(slice(None), *[slice(known)] * len(axes))].roll((-oldest,) * len(axes), axes)

        products, squares = by_age(self._products), by_age(self._squares)
        along, across = map(by_age, self._times(gradient))
        upper = products.triu()
        u = torch.linalg.solve_triangular(upper, along[..., None], upper=True)
        diagonal, gamma = products.diagonal(dim1=1, dim2=2)[..., None], self._gamma[..., None]
        right = diagonal * u + gamma * (squares @ u - across[..., None])
        v = torch.linalg.solve_triangular(upper.mT, right, upper=False)
        in_place = torch.cat([v, gamma * u], dim=2).roll(oldest, 1).mT.to(gradient)  # (problems, 2, known)
        steps = torch.bmm(in_place[:, :1], self._steps[:, :known])
        return (
            self._gamma.to(gradient) * gradient + (steps - torch.bmm(in_place[:, 1:], self._changes[:, :known]))[:, 0]
        )

    def _times(self, vector: Tensor) -> tuple[Tensor, Tensor]:
        """Return S and Y times ``vector`` (problems, size): (problems, known) each, in float64."""
        known = self._known
        return _products(self._steps[:, :known], vector), _products(self._changes[:, :known], vector)


def _products(rows: Tensor, vector: Tensor) -> Tensor:
    """Multiply each row of ``rows`` (problems, count, size) with its problem's ``vector`` (problems, size)."""
    if rows.is_cuda:  # a matrix product as thin as this keeps a few multiprocessors busy, a sum keeps all
        return (rows * vector[:, None]).sum(2, dtype=torch.float64)
    return torch.bmm(rows, vector[..., None])[..., 0].double()
