"""Map composition vectors to optimal similarities by a monotone network, the MMNN.

Paper, section "Imposing Monotonicity to the Learnable Model". The network is 14-64-1,
``g(v) = 1 - [softplus(b) + a.v + u.phi(W v + c)]`` with ``a, W, u > 0``: at most 1, the largest cosine, and strictly
lower with every further augmentation, because the linear path ``a.v`` has no dead zone and its slope is kept above
rounding errors. Softplus keeps the weights positive; the paper's reference (deep lattice networks) projects them.

The shape of ``phi`` decides what g can be. The paper's ReLU makes g concave in the counts, so that it falls ever faster
with length, while measured similarities fall ever more slowly. With bounded units, ``phi`` the logistic function, g is
a sum of falling steps of any size at any length: monotone, and of any curvature (``--mmnn-shape``).

The paper has "a 3-layer MLP", which may count layers of units, as here, or of weights: ``--mmnn-layers 3`` has another
64 hidden units, ``phi(V phi(W v + c) + e)`` with ``V > 0``, of the same shape.

Before training the network is fitted to the paper's constants (table "Constant l_d*"): a random one predicts
similarities far outside [-1, 1], where the gradients of loss and hyper-gradient vanish. ``Constants`` is the ablation
without MMNN and has the same call signature.
"""

from collections.abc import Iterable, Mapping
from functools import lru_cache
from itertools import combinations_with_replacement, pairwise
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from loaders.errors import UserError
from loaders.views.ops import BASIC

OPS = len(BASIC)
HIDDEN = 64  # units
LONGEST_FITTED = 10  # the paper goes up to composites of 10 augmentations

Shape = Literal["monotone", "concave"]
Layers = list[tuple[Tensor, Tensor]]  # positive weights and biases

# Smallest slope of g in a count, as a share of the network's total weight (see MMNN.forward). Float32 resolves 6e-8 of
# a value, so one more augmentation lowers g at any length that occurs, however large the weights have grown.
SLOPE_FLOOR = 1e-4
FIT_RESTRAINT = 1e-9  # weight of the penalty on moving the raw weights


def by_length(constants: Iterable[float]) -> dict[int, float]:
    """Map lengths 1, 2, 3, ... to ``constants``, as ``--constants`` names them."""
    return dict(enumerate(constants, start=1))


def similarity_at(constants: Mapping[int, float], length: int) -> float:
    """Interpolate ``constants`` linearly at ``length``, also beyond both ends.

    A single constant is joined with the point (0, 1), as an image has similarity 1 to itself.
    """
    constants = constants if len(constants) > 1 else {0: 1.0, **constants}
    known = sorted(constants)
    right = next((i for i, at in enumerate(known) if at >= length and i > 0), len(known) - 1)
    low, high = known[right - 1], known[right]
    slope = (constants[high] - constants[low]) / (high - low)
    return constants[low] + slope * (length - low)


def decaying_at(constants: Mapping[int, float], length: int) -> float:
    """Do as :func:`similarity_at`, but fall by a constant factor beyond the longest.

    Measured similarities do so (0.95, 0.86 and 0.62 at lengths 1, 3 and 10: a factor of 0.95 throughout), and a line
    would fall below them. Where the last constant is not positive, there is no such factor, and it is a line.
    """
    constants = constants if len(constants) > 1 else {0: 1.0, **constants}
    before, last = sorted(constants)[-2:]
    if length <= last or constants[last] <= 0:
        return similarity_at(constants, length)
    factor = (constants[last] / constants[before]) ** (1 / (last - before))
    return constants[last] * factor ** (length - last)


def check_constants(constants: Mapping[int, float], shape: Shape = "concave") -> None:
    """Raise a UserError for constants that no network of this shape can represent."""
    known = sorted(constants)
    if not known or known[0] < 1:
        raise UserError("constants: name at least one length of composites, each of 1 or more")
    if not all(-1.0 <= constants[at] < 1.0 for at in known):
        raise UserError("constants: every similarity must lie in [-1, 1)")
    slopes = [(constants[b] - constants[a]) / (b - a) for a, b in pairwise(known)]
    if any(slope >= 0 for slope in slopes):
        raise UserError("constants: the similarity must fall with every length")
    if shape == "concave" and any(later > earlier + 1e-6 for earlier, later in pairwise(slopes)):
        raise UserError("constants: with --mmnn-shape concave they must fall ever faster; use --mmnn-shape monotone")


class Constants(nn.Module):
    """The ablation without MMNN: a similarity per length, clipped to [-1, 1]."""

    table: Tensor

    def __init__(self, constants: Mapping[int, float]) -> None:
        super().__init__()
        values = [min(1.0, max(-1.0, similarity_at(constants, length))) for length in range(OPS * 255 + 1)]
        self.register_buffer("table", torch.tensor(values, dtype=torch.float32), persistent=False)

    def forward(self, composition: Tensor) -> Tensor:
        """Map ``composition`` (..., 14) uint8 counts to similarities (...) float32."""
        return self.table[composition.sum(-1, dtype=torch.int64)]


class MMNN(nn.Module):
    """``g(v) = 1 - [softplus(b) + a.v + u.phi(W v + c)]``, falling in every count.

    ``shape`` "concave" is the paper's network, with ReLU for ``phi``; "monotone" has the logistic function. Both have
    the same weights, so that a checkpoint does not tell which it is of. ``layers`` are 2 or 3.

    A new network is already fitted to ``constants``, one similarity per length; the same arguments always give the same
    weights, and the global random number generator is left alone. UserError for constants that a decreasing function of
    this shape cannot meet.
    """

    linear: nn.Parameter  # (14,), like all but hidden_bias before softplus
    hidden: nn.Parameter  # (64, 14)
    hidden_bias: nn.Parameter  # (64,)
    output: nn.Parameter  # (64,)
    bias: nn.Parameter  # ()
    middle: nn.Parameter | None  # (64, 64) and (64,), between hidden and output: with three layers
    middle_bias: nn.Parameter | None
    shape: Shape = "concave"

    def __init__(self, constants: Mapping[int, float], shape: Shape = "concave", layers: int = 2) -> None:
        super().__init__()
        check_constants(constants, shape)
        self.shape = shape
        fitted = _fitted(tuple(sorted(constants.items())), shape, layers)
        for name, value in {"middle": None, "middle_bias": None, **fitted}.items():
            self.register_parameter(name, None if value is None else nn.Parameter(value.clone()))

    def forward(self, composition: Tensor) -> Tensor:
        """Map ``composition`` (..., 14) uint8 to similarities (...), always float32."""
        with torch.autocast(composition.device.type, enabled=False):
            counts = composition.to(self.linear.dtype)
            linear, output, offset = F.softplus(self.linear), F.softplus(self.output), F.softplus(self.bias)
            layers = _layers(self.hidden, self.hidden_bias, self.middle, self.middle_bias)
            # An upper bound of the bracket at length 1, with which the smallest slope grows.
            weight = 1.0 + offset + linear.sum() + output @ _most(layers, self.shape)
            linear = linear + SLOPE_FLOOR * weight
            activity = _activity(counts, layers, self.shape)
            return 1.0 - (offset + F.linear(counts, linear[None])[..., 0] + F.linear(activity, output[None])[..., 0])


def _layers(hidden: Tensor, bias: Tensor, middle: Tensor | None, middle_bias: Tensor | None) -> Layers:
    """Pair the positive weights of hidden layers with their biases."""
    first = [(F.softplus(hidden), bias)]
    return first if middle is None or middle_bias is None else [*first, (F.softplus(middle), middle_bias)]


def _activity(counts: Tensor, layers: Layers, shape: Shape) -> Tensor:
    """Compute the last hidden units (..., 64) of ``counts`` (..., 14)."""
    for weight, bias in layers:
        inside = F.linear(counts, weight, bias)
        counts = F.relu(inside) if shape == "concave" else torch.sigmoid(inside)
    return counts


def _most(layers: Layers, shape: Shape) -> Tensor:
    """Bound the hidden units (64,) at length 1 from above; bounded ones at any."""
    if shape == "monotone":
        return torch.ones_like(layers[-1][1])
    most = torch.ones_like(layers[0][0][0])
    for weight, bias in layers:
        most = weight @ most + F.relu(bias)
    return most


def _initial_weights(shape: Shape, layers: int) -> dict[str, Tensor]:
    """Return the weights before the fit, before softplus."""
    # Hidden units differ in their weights, so that they can learn different combinations of ops, and in the length from
    # which they are active (bounded ones: at which they are half active, and how steeply they rise there), so that the
    # fit can bend anywhere in the range of lengths.
    generator = torch.Generator().manual_seed(0)
    weights = torch.empty(HIDDEN, OPS).uniform_(0.3, 0.5, generator=generator)
    onsets = torch.linspace(0.0, 6.0, HIDDEN)
    if shape == "monotone":
        weights *= torch.tensor([1.0, 2.0, 4.0, 8.0]).repeat(HIDDEN // 4)[:, None]
        onsets = torch.linspace(0.0, 10.0, HIDDEN)
    hidden_bias, further = -weights.mean(1) * onsets, {}
    if layers == 3:
        middle = torch.empty(HIDDEN, HIDDEN).uniform_(0.5, 1.5, generator=generator) / HIDDEN
        if shape == "monotone":  # the first units rise too slowly in the mean
            middle *= torch.tensor([5.0, 10.0, 20.0, 40.0]).repeat(HIDDEN // 4)[:, None]
        else:  # mostly those that are linear from the start, so that the second ones are linear from their own onset
            middle *= 12 * torch.exp(-2 * onsets)
        at_onset = _activity(onsets[:, None].expand(-1, OPS) / OPS, [(weights, hidden_bias)], shape)
        further = {"middle": _softplus_inverse(middle), "middle_bias": -(middle * at_onset).sum(1)}
    return further | {
        "linear": _softplus_inverse(torch.full((OPS,), 0.05)),
        "hidden": _softplus_inverse(weights),
        "hidden_bias": hidden_bias,
        "output": _softplus_inverse(torch.full((HIDDEN,), 0.05 / HIDDEN)),
        "bias": _softplus_inverse(torch.tensor(0.15)),
    }


@lru_cache(maxsize=16)
@torch.no_grad()
def _fitted(constants: tuple[tuple[int, float], ...], shape: Shape, count: int) -> dict[str, Tensor]:
    """Fit weights with which ``g`` meets a similarity per length, in float64.

    A least-squares fit of all composites of lengths 1 to 3 and a fixed sample of longer ones (up to 10) to the constant
    of their length, with little weight to the extrapolated value where there is none: of :func:`similarity_at` or, for
    a shape that can follow it, :func:`decaying_at`. Only offset, linear path and output weights move: ``g`` is linear
    in these after softplus, so that L-BFGS minimises one small quadratic form.
    """
    weights = _initial_weights(shape, count)
    counts, targets, importance = _fitting_set(dict(constants), shape)
    start = {name: value.double() for name, value in weights.items()}
    layers = _layers(start["hidden"], start["hidden_bias"], start.get("middle"), start.get("middle_bias"))
    length = counts.sum(1, keepdim=True)
    # One column per weight: what it adds to the bracket, directly and through the smallest slope.
    design = torch.cat([torch.ones_like(length), counts, _activity(counts, layers, shape)], 1)
    reach = torch.cat([torch.ones(1 + OPS).double(), _most(layers, shape)])
    design += SLOPE_FLOOR * length * reach
    wanted = 1.0 - targets - SLOPE_FLOOR * length[:, 0]
    weighted = design * importance[:, None]
    quadratic, linear = design.T @ weighted, weighted.T @ wanted

    before = torch.cat([start[name].view(-1) for name in ("bias", "linear", "output")])
    raw = before.clone().requires_grad_()
    optimiser = torch.optim.LBFGS(
        [raw], max_iter=300, line_search_fn="strong_wolfe", tolerance_grad=1e-9, tolerance_change=1e-13
    )

    def closure() -> float:
        optimiser.zero_grad()
        with torch.enable_grad():
            x = F.softplus(raw)
            # The penalty keeps weights that the fit does not need out of the flat end of softplus.
            error = 0.5 * x @ quadratic @ x - linear @ x + FIT_RESTRAINT * (raw - before).square().sum()
            error.backward()
        return error.item()

    optimiser.step(closure)
    bias, linear_path, output = raw.detach().float().split([1, OPS, HIDDEN])
    return weights | {"linear": linear_path, "output": output, "bias": bias[0]}


def _fitting_set(constants: Mapping[int, float], shape: Shape) -> tuple[Tensor, Tensor, Tensor]:
    """Return compositions (n, 14), similarities and weights (n,), in float64."""
    generator = torch.Generator().manual_seed(0)
    counts, targets, importance = [], [], []
    for length in range(1, LONGEST_FITTED + 1):
        if length <= 3:
            draws = torch.tensor(list(combinations_with_replacement(range(OPS), length)))
        else:
            draws = torch.randint(OPS, (256, length), generator=generator)
        counts.append(F.one_hot(draws, OPS).sum(1).double())
        at = similarity_at if shape == "concave" else decaying_at
        targets += [at(constants, length)] * len(draws)
        importance += [(1.0 if length in constants else 0.01) / len(draws)] * len(draws)
    return torch.cat(counts), torch.tensor(targets).double(), torch.tensor(importance).double()


def _softplus_inverse(value: Tensor) -> Tensor:
    return value + torch.log(-torch.expm1(-value))
