"""Test the consistency loss and its derivatives against literal formulas and autograd."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from cocor.methods.base import normalised
from cocor.objective.consistency import Sign, abs_loss, latent_similarity, pull_loss, softplus_loss


@pytest.fixture
def pair() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    similarity = torch.rand(3, 8, generator=generator, dtype=torch.float64) * 2 - 1
    target = torch.rand(3, 8, generator=generator, dtype=torch.float64)
    return similarity.requires_grad_(), target.requires_grad_()


def literal_softplus(similarity: Tensor, target: Tensor, beta: float, sign: Sign) -> Tensor:
    k = beta * (target.mean(1) - similarity.mean(1)) * (1 if sign == "text" else -1)
    lengths = list(torch.log1p(torch.exp(k)) / beta)
    return sum(lengths, torch.zeros(())) / len(lengths)


def literal_abs(similarity: Tensor, target: Tensor, epsilon: float) -> Tensor:
    return torch.sqrt((similarity - target) ** 2 + epsilon**2).mean() - epsilon


def test_similarity_is_the_cosine() -> None:
    composites = torch.randn(2, 4, 6, requires_grad=True)
    originals = torch.randn(4, 6, requires_grad=True)
    similarity = latent_similarity(composites, originals)
    assert torch.allclose(similarity, F.cosine_similarity(composites, originals[None], dim=-1), atol=1e-6)
    similarity.sum().backward()
    assert composites.grad is not None and originals.grad is None
    composites = torch.zeros(1, 2, 3)  # zero vectors have similarity zero
    composites[0, 1] = 1.0
    composites.requires_grad_()
    similarity = latent_similarity(composites, torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.0, 0.0]]))
    similarity.sum().backward()
    assert torch.equal(similarity, torch.zeros(1, 2))
    assert composites.grad is not None and torch.equal(composites.grad, torch.zeros_like(composites))
    composites, originals = torch.randn(1, 4, 256).bfloat16(), torch.randn(4, 256).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        similarity = latent_similarity(composites, originals)
    assert similarity.dtype == torch.float32
    assert torch.allclose(similarity, latent_similarity(composites.float(), originals.float()))
    rows = normalised(torch.tensor([[1e-17, 0.0], [1e18, 1e18]]))  # the extremes of float32
    assert torch.allclose(rows.norm(dim=1), torch.ones(2))


@pytest.mark.parametrize("sign", ["text", "printed"])
@pytest.mark.parametrize("beta", [1.0, 7.5])
def test_softplus_loss_and_its_derivatives(pair: tuple[Tensor, Tensor], beta: float, sign: Sign) -> None:
    similarity, target = pair
    loss = literal_softplus(similarity, target, beta, sign)
    (slope,) = torch.autograd.grad(loss, similarity, create_graph=True)
    curvature = [-torch.autograd.grad(slope[i, 0], target, retain_graph=True)[0][i, 0] * 8 * 8 for i in range(3)]

    result = softplus_loss(similarity, target, beta=beta, sign=sign)
    assert torch.allclose(result.loss, loss)
    assert torch.allclose(result.slope, slope.sum(1))
    assert torch.allclose(result.curvature, torch.stack(curvature))
    assert torch.allclose(result.similarity, similarity.mean(1)) and torch.allclose(result.target, target.mean(1))
    assert torch.allclose(torch.autograd.grad(result.loss, similarity)[0], slope)
    low, high = softplus_loss(torch.tensor([[-0.3], [1.0]]), torch.full((2, 1), 0.7), beta=beta, sign=sign).slope
    if sign == "text":
        assert low < min(beta, 5) * high < 0  # a higher similarity lowers the loss, most where it is low
    else:
        assert 0 < min(beta, 5) * low < high  # and as printed raises it, most where it is high
    far = softplus_loss(torch.zeros(2, 4), torch.tensor([[-300.0] * 4, [300.0] * 4]))
    assert bool(far.loss.isfinite()) and bool(far.curvature.isfinite().all())


def test_pull_is_half_the_distance(pair: tuple[Tensor, Tensor]) -> None:
    similarity, target = pair
    result = pull_loss(similarity, target, weight=0.3)
    assert torch.allclose(result.loss, 0.3 * (1 - similarity).mean() / 2) and not result.curvature.any()
    assert torch.allclose(result.slope, softplus_loss(similarity, similarity, weight=0.3, beta=8.0).slope)
    assert torch.allclose(torch.autograd.grad(result.loss, similarity)[0], torch.tensor(-0.3 / 48).double())


@pytest.mark.parametrize("epsilon", [0.05, 0.5])
def test_abs_loss_and_its_derivatives(pair: tuple[Tensor, Tensor], epsilon: float) -> None:
    similarity, target = pair
    loss = literal_abs(similarity, target, epsilon)
    (slope,) = torch.autograd.grad(loss, similarity, create_graph=True)
    (curvature,) = torch.autograd.grad(-slope.sum(), target, retain_graph=True)

    result = abs_loss(similarity, target, epsilon=epsilon)
    assert torch.allclose(result.loss, loss)
    assert torch.allclose(result.slope, slope)
    assert torch.allclose(result.curvature, curvature)
    assert torch.allclose(torch.autograd.grad(result.loss, similarity)[0], slope)


def test_abs_loss_without_smoothing_is_equation_2(pair: tuple[Tensor, Tensor]) -> None:
    similarity, target = pair
    result = abs_loss(similarity, target, epsilon=0.0)
    assert torch.allclose(result.loss, (similarity - target).abs().mean())
    assert not result.curvature.any() and not abs_loss(target, target, epsilon=0.0).slope.any()


@pytest.mark.parametrize("function", [softplus_loss, abs_loss, pull_loss])
def test_weight_and_lengths_scale_all_derivatives(function, pair: tuple[Tensor, Tensor]) -> None:
    similarity, target = pair
    plain, heavy = (function(similarity, target, weight=weight) for weight in (1.0, 3.0))
    parts = [function(similarity[i : i + 1], target[i : i + 1]) for i in range(3)]
    assert torch.allclose(plain.loss, torch.stack([part.loss for part in parts]).mean())
    for name in ("loss", "slope", "curvature"):
        assert torch.allclose(getattr(heavy, name), 3 * getattr(plain, name))
    for name in ("slope", "curvature"):
        assert torch.allclose(3 * getattr(plain, name), torch.cat([getattr(part, name) for part in parts]))
    assert torch.equal(heavy.unweighted, plain.loss) and torch.equal(heavy.similarity, plain.similarity)
    heavy.loss.backward()
    assert similarity.grad is not None and target.grad is None
    assert torch.allclose(similarity.grad, 3 * torch.autograd.grad(plain.loss, similarity)[0])


@pytest.mark.parametrize("function", [softplus_loss, abs_loss])
def test_two_ranks_give_the_global_loss(function, pair: tuple[Tensor, Tensor]) -> None:
    similarity, target = pair
    whole = function(similarity, target)
    (gradient,) = torch.autograd.grad(whole.loss, similarity)

    halves = [(similarity[:, :4], target[:, :4]), (similarity[:, 4:], target[:, 4:])]
    sent: list[Tensor] = []
    for half in halves:  # what each rank contributes to the mean
        function(*half, mean_over_ranks=lambda x: sent.append(x) or x)
    mean = torch.stack(sent).mean(0)
    results = [function(*half, mean_over_ranks=lambda x: mean) for half in halves]
    averaged = sum(torch.autograd.grad(result.loss, similarity)[0] for result in results) / 2
    for result in results:
        assert torch.allclose(result.loss, whole.loss)
        assert torch.allclose(result.similarity, whole.similarity)
    assert torch.allclose(averaged, gradient)
    if function is softplus_loss:
        assert torch.allclose(results[0].curvature, whole.curvature)
    else:
        assert torch.allclose(torch.cat([result.curvature for result in results], 1) / 2, whole.curvature)
