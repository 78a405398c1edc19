"""The memory of L-BFGS for many problems at once, in compact form: a direction costs two batched products.

With steps ``s`` and changes of the gradient ``y`` as rows of S and Y, R the upper triangle of S Y^T, D its diagonal and
gamma = s.y / y.y of the newest pair, the approximate inverse Hessian is (Byrd, Nocedal & Schnabel 1994, equation 3.1)

    H g = gamma g + S^T v - gamma Y^T u,    u = R^-1 S g,    v = R^-T ((D + gamma Y Y^T) u - gamma Y g)

The usual two-loop recursion would launch hundreds of small kernels an iteration and problem.
"""

import torch
from torch import Tensor


class Memory:
    """Up to ``pairs`` pairs of vectors of length ``size`` for each of ``problems``, in the dtype and on the device of
    ``like``. All problems add a pair together; one whose pair is useless gets zeros, which have no effect."""

    def __init__(self, pairs: int, problems: int, size: int, like: Tensor) -> None:
        self._pairs = pairs
        self._steps, self._changes = like.new_zeros(2, problems, pairs, size)
        self._products = torch.zeros(problems, pairs, pairs, dtype=torch.float64, device=like.device)  # S Y^T
        self._squares = torch.zeros_like(self._products)  # Y Y^T
        self._gamma = torch.ones(problems, 1, dtype=torch.float64, device=like.device)
        self._added = 0

    @property
    def known(self) -> int:
        """How many pairs are stored."""
        return min(self._added, self._pairs)

    def keep(self, problems: Tensor) -> None:
        """Forget all but these problems."""
        self._steps, self._changes = self._steps[problems], self._changes[problems]
        self._products, self._squares = self._products[problems], self._squares[problems]
        self._gamma = self._gamma[problems]

    def add(self, step: Tensor, change: Tensor) -> None:
        """Add a pair (problems, size) in the place of the oldest; zeros where rounding has made s.y <= 0."""
        product = (step * change).sum(1, keepdim=True).double()
        useful = product > 0
        self._gamma = torch.where(useful, product / change.square().sum(1, keepdim=True).double(), self._gamma)
        place = self._added % self._pairs
        self._added += 1
        self._steps[:, place], self._changes[:, place] = step * useful, change * useful
        along, across = self._times(self._changes[:, place])
        self._products[:, : self.known, place] = along
        self._products[:, place, place] = torch.where(useful, product, 1.0)[:, 0]  # zeros could not be solved for
        self._squares[:, place, : self.known] = self._squares[:, : self.known, place] = across

    def times(self, gradient: Tensor) -> Tensor:
        """The approximate inverse Hessians times ``gradient`` (problems, size); itself while the memory is empty."""
        if not self._added:
            return gradient
        known = self.known
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
        """S and Y times ``vector`` (problems, size): (problems, known) each, in float64."""
        known = self.known
        return _products(self._steps[:, :known], vector), _products(self._changes[:, :known], vector)


def _products(rows: Tensor, vector: Tensor) -> Tensor:
    """Each row of ``rows`` (problems, count, size) times its problem's ``vector`` (problems, size)."""
    if rows.is_cuda:  # a matrix product as thin as this keeps a few multiprocessors busy, a sum keeps all
        return (rows * vector[:, None]).sum(2, dtype=torch.float64)
    return torch.bmm(rows, vector[..., None])[..., 0].double()
