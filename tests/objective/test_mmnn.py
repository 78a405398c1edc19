"""Test that the MMNN falls in every count, meets the constants it is fitted to, and can learn."""

import time
from collections.abc import Callable
from copy import deepcopy
from itertools import combinations_with_replacement

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from cocor.config.options import Config
from cocor.config.resolve import load
from cocor.objective.mmnn import MMNN, OPS, Constants, Shape, _fitted, by_length, decaying_at, similarity_at
from loaders.errors import UserError

PAPER = by_length(Config.constants)


def vectors(length: int) -> Tensor:
    """All composition vectors of one length."""
    if length == 0:
        return torch.zeros(1, OPS, dtype=torch.uint8)
    draws = torch.tensor(list(combinations_with_replacement(range(OPS), length)))
    return F.one_hot(draws, OPS).sum(1).to(torch.uint8)


# Every pair (v, v + one augmentation) up to length 4; all other comparable pairs follow by transitivity.
WEAKER = torch.cat([vectors(length) for length in range(4)])
STRONGER = WEAKER[:, None] + torch.eye(OPS, dtype=torch.uint8)


def random_composites(length: int, count: int = 4096) -> Tensor:
    draws = torch.randint(OPS, (count, length), generator=torch.Generator().manual_seed(length))
    return F.one_hot(draws, OPS).sum(1).to(torch.uint8)


def assert_strictly_decreasing(g: MMNN) -> None:
    with torch.no_grad():
        weaker, stronger = g(WEAKER), g(STRONGER)
    assert weaker.max() <= 1.0
    assert bool((stronger < weaker[:, None]).all())


Kind = tuple[Shape, int]
SHAPES: tuple[Shape, ...] = ("concave", "monotone")
KINDS = [(shape, layers) for shape in SHAPES for layers in (2, 3)]
FITTED = {kind: MMNN(PAPER, *kind) for kind in KINDS}


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([0.05, 1.0, 30.0, 1000.0]), st.integers(1, 8), st.integers(1, 4),
       st.sampled_from(KINDS))  # fmt: skip
def test_strictly_decreasing_in_wild_training(seed: int, lr: float, steps: int, length: int, kind: Kind) -> None:
    g = deepcopy(FITTED[kind])
    generator = torch.Generator().manual_seed(seed)
    optimiser = torch.optim.SGD(g.parameters(), lr=lr, momentum=0.9)
    for _ in range(steps):
        rows = vectors(length)
        chosen = rows[torch.randint(len(rows), (32,), generator=generator)]
        loss = (torch.randn(32, generator=generator) * g(chosen)).mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    assert_strictly_decreasing(g)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([1.0, 10.0, 100.0, 1e4]), st.sampled_from(KINDS))
def test_strictly_decreasing_for_any_weights(seed: int, scale: float, kind: Kind) -> None:
    assert_strictly_decreasing(FITTED[kind])
    g = deepcopy(FITTED[kind])
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in g.parameters():
            parameter.copy_(scale * torch.randn(parameter.shape, generator=generator))
    assert_strictly_decreasing(g)


@pytest.mark.parametrize("method", ["moco", "simsiam", "byol"])
@pytest.mark.parametrize("layers", [2, 3])
@pytest.mark.parametrize(("shape", "beyond"), [("concave", similarity_at), ("monotone", decaying_at)])
def test_the_fit_meets_the_papers_constants(
    method: str, shape: Shape, beyond: Callable[..., float], layers: int
) -> None:
    constants = by_length(load(["--method", method]).constants)
    with torch.no_grad():
        g = MMNN(constants, shape, layers)
        for length, similarity in constants.items():
            values = g(random_composites(length))
            assert values.mean().item() == pytest.approx(similarity, abs=1.5e-3)
            assert values.std() < 0.005  # no op is favoured before there is evidence
        for length in range(4, 11):
            mean = g(random_composites(length)).mean().item()
            assert mean == pytest.approx(beyond(constants, length), abs=0.01)
            assert mean > -0.15
        for other in ({10: -0.05}, {1: 0.8}, {1: 0.9, 3: 0.5}, {2: 0.7, 5: 0.3}):
            for length, similarity in other.items():
                assert MMNN(other, shape, layers)(random_composites(length)).mean().item() == pytest.approx(
                    similarity, abs=3e-3
                )


def test_only_monotone_mmnns_fit_convex_constants() -> None:
    measured = {1: 0.95, 3: 0.86, 10: 0.62}  # similarities of a trained encoder
    with pytest.raises(UserError, match="--mmnn-shape concave"):
        MMNN(measured)
    with torch.no_grad():
        values = [MMNN(measured, "monotone")(random_composites(length)).mean().item() for length in (1, 3, 10)]
    assert values == pytest.approx([0.95, 0.86, 0.62], abs=2e-3)


def test_only_monotone_mmnns_learn_convex_targets() -> None:
    """Adam on the squared distance to similarities that fall ever more slowly, from the same start."""
    counts = torch.cat([random_composites(length, 64) for length in range(1, 11)])
    wanted = 0.3 + 0.6 * torch.exp(-0.5 * counts.sum(1))

    def distance(shape: Shape) -> float:
        g = deepcopy(FITTED[shape, 2])
        optimiser = torch.optim.Adam(g.parameters(), lr=0.05)
        for _ in range(300):
            optimiser.zero_grad()
            loss = (g(counts) - wanted).square().mean()
            loss.backward()
            optimiser.step()
        return loss.item() ** 0.5

    assert distance("monotone") < 0.02 < 0.04 < distance("concave")


def test_extrapolations_decay_by_a_factor() -> None:
    for constants, length, expected in [
        ({1: 0.8, 2: 0.4}, 4, 0.1), ({1: 0.8, 3: 0.2}, 4, 0.1), ({1: 0.8, 2: 0.4}, 2, 0.4), ({2: 0.25}, 4, 0.0625),
        ({1: 0.5, 2: -0.1}, 3, -0.7),  # no factor leads below 0
    ]:  # fmt: skip
        assert decaying_at(constants, length) == pytest.approx(expected)


def test_weights_of_before_shapes_are_concave() -> None:
    g = MMNN(PAPER)
    assert g.shape == "concave" and set(g.state_dict()) == {"linear", "hidden", "hidden_bias", "output", "bias"}
    counts = random_composites(2, 8)
    a, w, u, b = (F.softplus(getattr(g, name)) for name in ("linear", "hidden", "output", "bias"))
    floor = 1e-4 * (1 + b + a.sum() + u @ (w.sum(1) + g.hidden_bias.relu()))
    literal = 1 - (b + counts.float() @ (a + floor) + (counts.float() @ w.T + g.hidden_bias).relu() @ u)
    assert torch.allclose(g(counts), literal, atol=1e-6)


@pytest.mark.parametrize("layers", [2, 3])
def test_the_fit_is_deterministic_and_fast(layers: int) -> None:
    state = torch.get_rng_state()
    first = MMNN(PAPER, layers=layers)
    _fitted.cache_clear()
    began = time.process_time()
    second = MMNN(PAPER, layers=layers)
    assert (time.process_time() - began) / torch.get_num_threads() < 1.0
    assert torch.equal(torch.get_rng_state(), state)
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("kind", KINDS)
def test_every_weight_can_learn(kind: Kind) -> None:
    g = deepcopy(FITTED[kind])
    g(torch.cat([vectors(length) for length in (1, 2, 3)])).sum().backward()
    assert bool((g.linear.grad != 0).all()) and g.bias.grad != 0
    assert g.shape == "concave" or bool((g.hidden.grad != 0).all())  # bounded units are never quite off
    assert ((g.hidden.grad != 0).all(1)).float().mean() > 0.4  # units that set in at longer lengths wait for those


@pytest.mark.parametrize("kind", KINDS)
def test_output_is_float32_under_autocast(kind: Kind) -> None:
    composition = torch.stack([random_composites(length, 5) for length in (1, 2, 3)])
    with torch.autocast("cpu", torch.bfloat16):
        mixed = FITTED[kind](composition)
    assert mixed.dtype == torch.float32 and mixed.shape == (3, 5)
    assert torch.equal(FITTED[kind](composition), mixed)


def test_constants_are_continued_in_a_line() -> None:
    constants = Constants(PAPER)
    composition = torch.stack([random_composites(length, 4) for length in (1, 2, 3, 5)])
    expected = torch.tensor([0.80, 0.75, 0.65, 0.45])
    assert torch.allclose(constants(composition), expected[:, None].expand(4, 4))
    assert not list(constants.parameters()) and not constants.state_dict()
    assert Constants({2: 0.5})(random_composites(2, 1)).item() == 0.5
    assert constants(random_composites(40, 1)).item() == -1.0  # a cosine ends there


@pytest.mark.parametrize(
    "constants", [{}, {0: 1.0, 1: 0.8}, {1: 1.0}, {1: 0.8, 2: 0.8}, {1: 0.8, 2: 0.5, 3: 0.4}, {1: -1.1}]
)
def test_constants_must_be_concave_and_fall(constants: dict[int, float]) -> None:
    with pytest.raises(UserError, match="constants:"):
        MMNN(constants)
