"""Test the hyper-gradient against autograd through the encoder's unrolled step, in float64."""

import copy
from collections.abc import Callable

import pytest
import timm
import torch
from helpers.steps import backbone, tiny
from torch import Tensor
from torch.nn import functional as F

from cocor.methods.base import Method, batch_statistics_only
from cocor.methods.moco import MoCo
from cocor.methods.simsiam import SimSiam
from cocor.objective.consistency import Consistency, abs_loss, latent_similarity, softplus_loss
from cocor.objective.hypergradient import Measured, exact, inner_products, sample_inner_products, taylor
from cocor.objective.mmnn import MMNN

LENGTHS, BATCH, LR, MOMENTUM, DECAY = 3, 6, 0.05, 0.9, 1e-2


def moco() -> Method:
    return tiny("split").double()


def simsiam() -> Method:
    return tiny("simsiam").double()


def vit() -> Method:
    network = timm.create_model("test_vit", num_classes=0, img_size=32)
    return SimSiam(network, projector_dim=16, predictor_dim=8).double()


def literal_softplus(similarity: Tensor, target: Tensor, beta: float = 2.0) -> Tensor:
    return (F.softplus(beta * (target.mean(1) - similarity.mean(1))) / beta).mean()


def literal_abs(similarity: Tensor, target: Tensor, epsilon: float = 0.1) -> Tensor:
    return ((similarity - target).square() + epsilon**2).sqrt().mean()


class Problem:
    """A method, its optimiser with a filled momentum buffer, one unlabelled and one labelled batch, and an MMNN."""

    def __init__(self, method: Method, nesterov: bool = False) -> None:
        generator = torch.Generator().manual_seed(1)

        def images(*shape: int) -> Tensor:
            return torch.randn(*shape, 3, 32, 32, generator=generator, dtype=torch.float64)

        self.views, self.original, self.composites = images(2, BATCH), images(BATCH), images(LENGTHS, BATCH)
        draws = [torch.randint(14, (BATCH, length), generator=generator) for length in range(1, LENGTHS + 1)]
        self.composition = torch.stack([F.one_hot(d, 14).sum(1) for d in draws]).to(torch.uint8)
        self.labelled, self.label = images(8), torch.arange(8) % 4
        self.mmnn = MMNN({1: 0.8, 2: 0.75, 3: 0.65}).double()
        self.classifier = torch.randn(4, 96, generator=generator, dtype=torch.float64) / 5
        self.method = method
        self.optimiser = torch.optim.SGD(method.parameter_groups(DECAY), lr=LR, momentum=MOMENTUM, nesterov=nesterov)
        self.encoder_loss(literal_softplus)[0].backward()
        self.optimiser.step()
        method.after_step()
        self.optimiser.zero_grad()
        self.mmnn.zero_grad()

    def similarity(self) -> Tensor:
        original = self.method.embed_original(self.original)
        return latent_similarity(torch.stack([self.method.embed_composite(x) for x in self.composites]), original)

    def encoder_loss(self, literal: Callable[[Tensor, Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        similarity = self.similarity()
        loss = self.method.contrastive(self.views) + literal(similarity, self.mmnn(self.composition))
        return loss, similarity

    def cross_entropy(self, weights: dict[str, Tensor] | None = None) -> Tensor:
        with batch_statistics_only(self.method.backbone):
            features = torch.func.functional_call(self.method.backbone, weights or {}, (self.labelled,))
        return F.cross_entropy(features @ self.classifier.T, self.label)

    def unrolled(self, literal: Callable[[Tensor, Tensor], Tensor], nesterov: bool = False) -> dict[str, Tensor]:
        """d CE(theta') / d theta_d by differentiating through the step, and nothing changed."""
        loss, _ = self.encoder_loss(literal)
        names = [name for name, p in self.method.backbone.named_parameters()]
        parameters = list(self.method.backbone.parameters())
        weights = {}
        gradients = torch.autograd.grad(loss, parameters, create_graph=True)
        for name, parameter, gradient in zip(names, parameters, gradients, strict=True):
            gradient = gradient + DECAY * parameter.detach()
            buffer = MOMENTUM * self.optimiser.state[parameter]["momentum_buffer"] + gradient
            weights[name] = parameter.detach() - LR * (gradient + MOMENTUM * buffer if nesterov else buffer)
        self.moved = {name: value.detach() for name, value in weights.items()}
        values = torch.autograd.grad(self.cross_entropy(weights), list(self.mmnn.parameters()))
        return dict(zip([name for name, _ in self.mmnn.named_parameters()], values, strict=True))

    def step(self, consistency: Consistency) -> list[Tensor]:
        """The optimiser's own step, then grad CE(theta')."""
        (self.method.contrastive(self.views) + consistency.loss).backward()
        self.optimiser.step()
        for name, parameter in self.method.backbone.named_parameters():
            assert torch.allclose(parameter, self.moved[name], rtol=1e-12, atol=1e-14)
        return list(torch.autograd.grad(self.cross_entropy(), list(self.method.backbone.parameters())))

    def assert_mmnn_gradients(self, expected: dict[str, Tensor], tolerance: float = 1e-10) -> None:
        scale = max(float(value.abs().max()) for value in expected.values())
        assert scale > 0
        for name, parameter in self.mmnn.named_parameters():
            assert parameter.grad is not None
            assert float((parameter.grad - expected[name]).abs().max()) < tolerance * scale, name


@pytest.mark.parametrize("nesterov", [False, True], ids=["momentum", "nesterov"])
@pytest.mark.parametrize("make", [moco, simsiam])
def test_exact_is_autograd_for_softplus(make: Callable[[], Method], nesterov: bool) -> None:
    problem = Problem(make(), nesterov)
    expected = problem.unrolled(literal_softplus, nesterov)

    target = problem.mmnn(problem.composition)
    similarity = problem.similarity()
    consistency = softplus_loss(similarity, target, beta=2.0)
    parameters = list(problem.method.backbone.parameters())
    gradients = [torch.autograd.grad(s.mean(), parameters, retain_graph=True) for s in similarity]
    ce_gradient = problem.step(consistency)
    rate = LR * (1 + MOMENTUM) if nesterov else LR
    exact(target, consistency.curvature, inner_products(gradients, ce_gradient), rate).backward()
    problem.assert_mmnn_gradients(expected)


@pytest.mark.parametrize("make", [moco, simsiam])
def test_exact_is_autograd_for_smoothed_abs(make: Callable[[], Method]) -> None:
    problem = Problem(make())
    expected = problem.unrolled(literal_abs)

    target = problem.mmnn(problem.composition)
    consistency = abs_loss(problem.similarity(), target, epsilon=0.1)
    before = {name: parameter.detach().clone() for name, parameter in problem.method.named_parameters()}
    original = problem.method.embed_original(problem.original)
    ce_gradient = problem.step(consistency)
    names = [f"backbone.{name}" for name, _ in problem.method.backbone.named_parameters()]
    products = sample_inner_products(
        problem.method, problem.composites, original, dict(zip(names, ce_gradient, strict=True)), before
    )
    assert products.shape == (LENGTHS, BATCH) and not products.requires_grad
    exact(target, consistency.curvature, products, LR).backward()
    problem.assert_mmnn_gradients(expected)


@pytest.mark.parametrize("make", [simsiam, vit])  # fused attention has no forward-mode derivative
def test_sample_inner_products_average_to_lengths(make: Callable[[], Method]) -> None:
    problem = Problem(make())
    similarity = problem.similarity()
    parameters = dict(problem.method.backbone.named_parameters())
    gradients = [torch.autograd.grad(s.mean(), list(parameters.values()), retain_graph=True) for s in similarity]
    direction = {f"backbone.{name}": torch.randn_like(parameter) for name, parameter in parameters.items()}
    state = copy.deepcopy(problem.method.state_dict())
    original = problem.method.embed_original(problem.original)
    products = sample_inner_products(problem.method, problem.composites, original, direction)
    assert torch.allclose(products.mean(1), inner_products(gradients, list(direction.values())), rtol=1e-10)
    assert all(torch.equal(state[name], value) for name, value in problem.method.state_dict().items())


def test_exact_moves_targets_where_that_helps() -> None:
    target = torch.zeros(2, 4, requires_grad=True)
    curvature, products = torch.full((2,), 0.2, requires_grad=True), torch.tensor([-1.0, 1.0], requires_grad=True)
    exact(target, curvature, products, 0.1).backward()
    assert target.grad is not None and curvature.grad is None and products.grad is None
    assert bool((target.grad[0] < 0).all()) and bool((target.grad[1] > 0).all())
    similarity = [[torch.tensor([1.0, 2.0]), torch.tensor([[3.0]])], [torch.tensor([0.0, 1.0]), torch.tensor([[1.0]])]]
    ce = [torch.tensor([1.0, -1.0]), torch.tensor([[2.0]])]
    assert inner_products(similarity, ce, lambda x: x / 2).tolist() == [2.5, 0.5]  # averaged over ranks


class OneParameter:
    """An encoder with a single weight, where finite differences leave the paper's projection nothing to lose.

    It maps a number to an angle, ``f(x) = (cos(w x), sin(w x))``, so that a pair's similarity is ``cos(w (x' - x))``.
    """

    def __init__(self, seed: int, lr: float = 1e-4) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.shift = torch.rand(2, 5, generator=generator, dtype=torch.float64) + 0.2
        self.pull = 4.0 * torch.rand((), generator=generator, dtype=torch.float64) - 2.0
        self.best = 4.0 * torch.rand((), generator=generator, dtype=torch.float64) - 2.0
        self.w = torch.rand((), generator=generator, dtype=torch.float64) + 0.5
        self.target = torch.rand(2, 5, generator=generator, dtype=torch.float64).requires_grad_()
        self.lr = lr

    def measure(self, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Encoder loss, cross-entropy (of one label) and mean similarities."""
        similarity = torch.cos(w * self.shift)
        loss = torch.sin(self.pull * w) + F.softplus(self.target.mean(1) - similarity.mean(1)).mean()
        return loss, F.softplus(-self.best * w), similarity.mean(1)

    def run(self) -> tuple[Tensor, Measured, Measured, Tensor]:
        """True d CE / d target, measurements before and after the step, and the loss's curvature."""
        w = self.w.clone().requires_grad_()
        before = self.measure(w)
        moved = w - self.lr * torch.autograd.grad(before[0], w, create_graph=True)[0]
        after = self.measure(moved)
        (truth,) = torch.autograd.grad(after[1], self.target)
        curvature = softplus_loss(torch.cos(self.w * self.shift), self.target).curvature
        return truth, Measured(*(x.detach() for x in before)), Measured(*(x.detach() for x in after)), curvature


@pytest.mark.parametrize("seed", range(8))
def test_taylor_for_a_one_parameter_encoder(seed: int) -> None:
    problem = OneParameter(seed)
    truth, before, after, curvature = problem.run()
    (gradient,) = torch.autograd.grad(taylor(problem.target, curvature, before, after, floor=1e-14), problem.target)
    assert torch.allclose(gradient, truth, rtol=0.02)
    # Eq. 12 as printed, whose sign is the opposite:
    # (CE' - CE) E_l[ e^k / (1 + e^k)^2 (sim' - sim) / (L' - L) d mean g ].
    k = before.similarity - problem.target.detach().mean(1)
    slope = k.exp() / (1 + k.exp()) ** 2
    ratio = (after.similarity - before.similarity) / (after.loss - before.loss)
    printed = (after.cross_entropy - before.cross_entropy) * (slope * ratio * problem.target.mean(1)).mean()
    (gradient,) = torch.autograd.grad(printed, problem.target)
    assert torch.allclose(gradient, -truth, rtol=0.02)


@pytest.mark.parametrize(("fall", "sign"), [(-1e-9, 1.0), (0.0, 1.0), (1e-9, -1.0)])
def test_taylor_guards_a_small_denominator(fall: float, sign: float) -> None:
    target = torch.zeros(1, 1, requires_grad=True)
    zero = torch.zeros((), dtype=torch.float64)
    before, after = Measured(zero, zero, torch.zeros(1)), Measured(zero + fall, zero + 1.0, torch.ones(1))
    taylor(target, torch.full((1,), 0.25), before, after, floor=1e-4).backward()
    assert target.grad is not None and target.grad.item() == pytest.approx(sign * 0.25 / 1e-4)
    target = torch.zeros(2, 3, requires_grad=True)  # of single samples
    before = Measured(torch.tensor(1.0), torch.tensor(1.0), torch.zeros(2, 3))
    after = Measured(torch.tensor(0.5), torch.tensor(0.8), torch.arange(6.0).view(2, 3))
    taylor(target, torch.ones(2, 3), before, after).backward()
    assert target.grad is not None and torch.allclose(target.grad, -torch.arange(6.0).view(2, 3) * 0.4)


@pytest.mark.gpu
def test_sample_inner_products_on_the_gpu() -> None:
    method = MoCo(backbone(), embedding_dim=8, queue_size=64, key_bn_splits=1)
    method.cuda().to(memory_format=torch.channels_last)
    composites, original = torch.randn(2, 32, 3, 32, 32, device="cuda"), torch.randn(32, 3, 32, 32, device="cuda")
    direction = {f"backbone.{name}": torch.randn_like(p) for name, p in method.backbone.named_parameters()}
    exact_values = sample_inner_products(method, composites, method.embed_original(original), direction)
    with torch.autocast("cuda", torch.bfloat16):
        values = sample_inner_products(method, composites, method.embed_original(original), direction)
    assert torch.corrcoef(torch.stack([values.flatten(), exact_values.flatten()]))[0, 1] > 0.9
