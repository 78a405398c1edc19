"""The memory of L-BFGS in its compact form: a direction costs two matrix-vector products, not a loop over the pairs.

With steps ``s`` and changes of the gradient ``y`` as rows of S and Y, R the upper triangle of S Y^T, D its diagonal and
gamma = s.y / y.y of the newest pair, the approximate inverse Hessian is (Byrd, Nocedal & Schnabel 1994, equation 3.1)

    H g = gamma g + S^T v - gamma Y^T u,    u = R^-1 S g,    v = R^-T ((D + gamma Y Y^T) u - gamma Y g)

On a GPU the usual two-loop recursion launches hundreds of small kernels an iteration, more than the problem itself.
"""

import torch
from torch import Tensor


class Memory:
    """Up to ``pairs`` pairs of vectors of length ``size`` in the dtype and on the device of ``like``."""

    def __init__(self, pairs: int, size: int, like: Tensor) -> None:
        self._steps, self._changes = like.new_zeros(pairs, size), like.new_zeros(pairs, size)
        self._products = torch.zeros(pairs, pairs, dtype=torch.float64, device=like.device)  # S Y^T
        self._squares = torch.zeros_like(self._products)  # Y Y^T
        self._order: list[int] = []  # places, oldest first

    def __len__(self) -> int:
        return len(self._order)

    def clear(self) -> None:
        self._order = []

    def add(self, step: Tensor, change: Tensor) -> None:
        """Remember a pair in the place of the oldest, unless rounding has made their product useless."""
        if not torch.dot(step, change) > 0:
            return
        full = len(self._order) == len(self._steps)
        place = self._order.pop(0) if full else len(self._order)
        self._order.append(place)
        self._steps[place], self._changes[place] = step, change
        self._products[:, place] = (self._steps @ change).double()
        self._products[place] = (self._changes @ step).double()
        self._squares[place] = self._squares[:, place] = (self._changes @ change).double()

    def times(self, gradient: Tensor) -> Tensor:
        """The approximate inverse Hessian times ``gradient``; the gradient itself while the memory is empty."""
        if not self._order:
            return gradient
        order = torch.tensor(self._order, device=gradient.device)
        products, squares = (table[order][:, order] for table in (self._products, self._squares))
        along, across = (self._steps @ gradient)[order].double(), (self._changes @ gradient)[order].double()
        upper = products.triu()
        gamma = products[-1, -1] / squares[-1, -1]
        u = torch.linalg.solve_triangular(upper, along[:, None], upper=True)
        right = products.diagonal()[:, None] * u + gamma * (squares @ u - across[:, None])
        v = torch.linalg.solve_triangular(upper.T, right, upper=False)
        weights = gradient.new_zeros(2, len(self._steps))
        weights[0, order], weights[1, order] = v[:, 0].to(gradient), (gamma * u[:, 0]).to(gradient)
        return gamma.to(gradient) * gradient + weights[0] @ self._steps - weights[1] @ self._changes
