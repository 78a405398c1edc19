"""Test the losses of SupCon, SimCLR, BYOL, INTL, Barlow Twins and VICReg against slow literal formulas, in float64."""

import math
from typing import Any

import pytest
import torch
from helpers.steps import LABELS, backbone, images, noise_config, tiny
from torch import Tensor, nn
from torch.nn import functional as F

from cocor.config.resolve import load
from cocor.methods.barlow import BIAS_SHARE, BarlowTwins, redundancy_reduction
from cocor.methods.base import Ranks, batch_statistics_only
from cocor.methods.byol import target_momentum
from cocor.methods.intl import INTL, iterative_normalisation_loss, trace_loss, whitened
from cocor.methods.simclr import SimCLR
from cocor.methods.simsiam import SimSiam
from cocor.methods.supcon import SupCon, supervised_contrastive
from cocor.methods.vicreg import VICReg, variance_invariance_covariance
from cocor.step.optim import build_optimiser
from loaders.errors import UserError


def rows(count: int, width: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, width, generator=generator, dtype=torch.float64).requires_grad_()


def assert_same_with_gradient(one: Tensor, other: Tensor, leaf: Tensor) -> None:
    torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    gradients = (torch.autograd.grad(value, leaf, retain_graph=True)[0] for value in (one, other))
    torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-12)


class TestSupCon:
    @staticmethod
    def literal(z: Tensor, labels: list[int], temperature: float) -> Tensor:
        """Khosla et al. 2020, the loss "out", term by term."""
        total = torch.zeros((), dtype=torch.float64)
        for i in range(len(z)):
            positives = [p for p in range(len(z)) if p != i and labels[p] == labels[i]]
            everyone = sum(torch.exp(z[i] @ z[a] / temperature) for a in range(len(z)) if a != i)
            for p in positives:
                total = total - torch.log(torch.exp(z[i] @ z[p] / temperature) / everyone) / len(positives)
        return total / len(z)

    @pytest.mark.parametrize("labels", [[0, 0, 1, 1, 2, 2], [0, 0, 0, 0, 0, 0], [3, 1, 2, 3, 3, 1], [0, 1, 2, 3, 4, 5]])
    def test_the_loss_is_its_papers(self, labels: list[int]) -> None:
        leaf = rows(6, 5)
        z = F.normalize(leaf, dim=1)
        expected = self.literal(z, labels, 0.3)
        loss = supervised_contrastive(z, torch.tensor(labels), 0.3)
        if len(set(labels)) == 6:
            assert loss == 0 and torch.autograd.grad(loss, leaf)[0].isfinite().all()
        else:
            assert_same_with_gradient(loss, expected, leaf)

    def test_labels_belong_to_both_views(self) -> None:
        method, views = tiny("supcon"), images(2, 6)
        z = torch.cat([F.normalize(method.head(method.backbone(view)), dim=1) for view in views])
        for labels in (LABELS, torch.arange(6)):  # a lonely label has its other view
            expected = self.literal(z.double(), [*labels.tolist(), *labels.tolist()], 0.07)
            loss = method.contrastive(views, labels)
            assert torch.allclose(loss, expected.float(), atol=1e-5)
            loss.backward()
            assert all(p.grad is not None and p.grad.isfinite().all() for p in method.parameters())


class TestByol:
    def test_the_loss_is_its_papers(self) -> None:
        method = tiny("byol").double()
        with torch.no_grad():  # as after some training: the target is elsewhere
            for parameter in [*method.target_backbone.parameters(), *method.target_projector.parameters()]:
                parameter.mul_(1.1)
        views = images(2, 6).double()
        expected = torch.zeros((), dtype=torch.float64)
        with batch_statistics_only(method):
            for one, other in ((0, 1), (1, 0)):
                prediction = method.predictor(method.projector(method.backbone(views[one])))
                target = method.target_projector(method.target_backbone(views[other])).detach()
                for p, z in zip(prediction, target, strict=True):
                    expected = expected + ((p / p.norm() - z / z.norm()) ** 2).sum() / 6
        loss = method.contrastive(views)
        torch.testing.assert_close(loss, expected, rtol=1e-10, atol=1e-12)
        online = [p for p in method.parameters() if p.requires_grad]
        gradients = (torch.autograd.grad(value, online) for value in (loss, expected))
        for one, other in zip(*gradients, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-7, atol=1e-10)

    def test_the_momentum_rises_from_its_start_to_1(self) -> None:
        values = [target_momentum(torch.tensor(k), 200, 0.97).item() for k in range(201)]
        literal = [1 - (1 - 0.97) * (math.cos(math.pi * k / 200) + 1) / 2 for k in range(201)]
        assert values == pytest.approx(literal, abs=1e-12)
        assert (values[0], values[100], values[200]) == pytest.approx((0.97, 0.985, 1.0))
        assert target_momentum(torch.tensor(300), 200, 0.97) == 1.0

    def test_the_target_moves_by_the_schedule(self) -> None:
        method = tiny("byol")
        with torch.no_grad():
            for parameter in [*method.backbone.parameters(), *method.projector.parameters()]:
                parameter.add_(1.0)
        targets = [*method.target_backbone.parameters(), *method.target_projector.parameters()]
        online = [*method.backbone.parameters(), *method.projector.parameters()]
        for step in range(3):
            momentum = 1 - 0.1 * (math.cos(math.pi * step / 10) + 1) / 2
            expected = [momentum * t + (1 - momentum) * o for t, o in zip(targets, online, strict=True)]
            method.after_step()
            for target, value in zip(targets, expected, strict=True):
                torch.testing.assert_close(target.detach(), value.detach(), rtol=1e-5, atol=1e-6)
        assert method.step == 3 and "step" in method.state_dict()


class TestIntl:
    @staticmethod
    def literal(views: list[Tensor], iterations: int, weight: float) -> Tensor:
        """Its authors' default setting: a batch of N is whitened among its images, entry by entry."""
        (n, d), white, trace_terms = views[0].shape, [], torch.zeros((), dtype=torch.float64)
        for x in views:
            centred = torch.stack([row - row.sum() / d for row in x])
            sigma = torch.stack([torch.stack([(a * b).sum() / (d - 1) for b in centred]) for a in centred])
            trace = sum(sigma[i, i] for i in range(n))
            p = torch.eye(n, dtype=torch.float64)
            for _ in range(iterations):
                p = (3 * p - torch.matrix_power(p, 3) @ (sigma / trace)) / 2
            white.append(p @ centred / torch.sqrt(trace))
            for row in white[-1]:
                variance = ((row - row.sum() / d) ** 2).sum() / (d - 1)
                trace_terms = trace_terms + (variance - 1) ** 2
        distance = sum(2 - 2 * (a @ b) / (a.norm() * b.norm()) for a, b in zip(*white, strict=True)) / n
        return distance + weight * trace_terms

    @pytest.mark.parametrize("iterations", [1, 4])
    def test_the_loss_is_its_authors(self, iterations: int) -> None:
        leaf = rows(10, 9)
        views = [leaf[:5], leaf[5:]]
        loss = iterative_normalisation_loss(*views, iterations, 0.05)
        assert_same_with_gradient(loss, self.literal(views, iterations, 0.05), leaf)

    def test_many_steps_whiten_a_batch(self) -> None:
        white = whitened(rows(6, 40), 20)
        torch.testing.assert_close(white @ white.T / 39, torch.eye(6, dtype=torch.float64), atol=1e-6, rtol=0)
        assert trace_loss(white) < 1e-9

    def test_equal_embeddings_give_numbers(self) -> None:
        same = torch.ones(4, 9, requires_grad=True)
        loss = iterative_normalisation_loss(same, same, 4, 0.05)
        loss.backward()
        assert loss.isfinite() and same.grad is not None and same.grad.isfinite().all()
        with pytest.raises(UserError, match=r"embedding_dim: 128 must be more than batch_size: 256, as INTL"):
            load(["--method", "intl", "--embedding-dim", "128"])

    def test_whitening_is_float32_under_autocast(self) -> None:
        method = tiny("intl")
        seen: list[torch.dtype] = []
        gather = lambda tensor: (seen.append(tensor.dtype), torch.cat([tensor, tensor]))[1]  # noqa: E731
        method.ranks = Ranks(0, 2, gather)
        with torch.autocast("cpu", torch.bfloat16):
            loss = method.contrastive(images(2, 6))
        embeddings, logged = seen[:2], seen[2:]  # the last for feature_std
        assert embeddings == [torch.float32] * 2 and logged == [torch.bfloat16] and loss.dtype == torch.float32

    def test_trace_weight_follows_the_batch(self) -> None:
        views, losses = images(2, 6), []
        for choice in (None, 0.01 * (math.log2(6) - 3)):
            torch.manual_seed(0)
            losses.append(INTL(backbone(), embedding_dim=16, projector_dim=24, trace_weight=choice).contrastive(views))
        assert losses[0] == losses[1]


def test_simclrs_loss_is_nt_xent() -> None:
    method, views = tiny("simclr").double(), images(2, 5).double()
    z = torch.cat([method.encode(view) for view in views])
    expected = torch.zeros((), dtype=torch.float64)
    for i in range(10):
        others = sum(torch.exp(z[i] @ z[k] / 0.1) for k in range(10) if k != i)
        expected = expected - torch.log(torch.exp(z[i] @ z[(i + 5) % 10] / 0.1) / others) / 10
    loss = method.contrastive(views)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    assert method.head[-1].bias.grad is None and not method.head[-1].bias.any()


SHAPES = pytest.mark.parametrize(("count", "width"), [(5, 9), (9, 5)])  # each has a product of its own


@SHAPES
def test_barlow_twins_loss(count: int, width: int) -> None:
    leaf = rows(2 * count, width)
    views = [(part - part.mean(0)) / part.std(0, correction=0) for part in leaf.chunk(2)]
    expected = torch.zeros((), dtype=torch.float64)
    for i in range(width):
        for j in range(width):
            c = sum(views[0][b, i] * views[1][b, j] for b in range(count)) / count
            expected = expected + ((1 - c) ** 2 if i == j else 0.3 * c**2)
    assert_same_with_gradient(redundancy_reduction(*views, 0.3), expected, leaf)


def test_barlow_twins_standardises_and_slows_biases() -> None:
    method = tiny("barlow")
    features = method.projector(method.backbone(images(6)))
    torch.testing.assert_close(features.mean(0), torch.zeros(16), atol=1e-5, rtol=0)
    weights, others = method.parameter_groups(1e-4)
    assert {p.ndim for p in weights["params"]} == {2, 4} and {p.ndim for p in others["params"]} == {1}
    assert "lr_share" not in weights and others["lr_share"] == BIAS_SHARE == pytest.approx(0.024)
    for optimiser, share in (("lars", BIAS_SHARE), ("sgd", 1.0), ("adamw", 1.0)):
        groups = build_optimiser(noise_config(method="barlow", optimiser=optimiser), method).param_groups
        assert groups[-1].get("lr_share", 1.0) == share and groups[-1]["params"][0].ndim == 1


@SHAPES
def test_vicregs_loss_is_its_papers(count: int, width: int) -> None:
    leaf = rows(2 * count, width)
    first, second = leaf.chunk(2)
    apart = sum((a - b).square().sum() for a, b in zip(first, second, strict=True)) / (count * width)
    variance = covariance = torch.zeros((), dtype=torch.float64)
    for view in (first, second):
        mean = view.sum(0) / count
        cov = sum(torch.outer(row - mean, row - mean) for row in view) / (count - 1)
        for i in range(width):
            variance = variance + torch.relu(1 - (cov[i, i] + 1e-4).sqrt()) / width / 2
            covariance = covariance + sum(cov[i, j] ** 2 for j in range(width) if j != i) / width
    loss = variance_invariance_covariance(first, second, (2.0, 3.0, 0.5))
    assert_same_with_gradient(loss, 2 * apart + 3 * variance + 0.5 * covariance, leaf)


@pytest.mark.parametrize(
    ("kind", "layers"),
    [
        (BarlowTwins, {"projector": [(8192, False)] * 3}),
        (VICReg, {"projector": [(8192, True), (8192, True), (8192, False)]}),
        (SimCLR, {"head": [(96, False), (128, False)]}),
        (SupCon, {"head": [(96, True), (128, True)]}),
        (INTL, {"projector": [(8192, False), (8192, False), (8192, True)]}),
        (SimSiam, {"projector": [(2048, False)] * 3, "predictor": [(512, False), (2048, True)]}),
    ],
)
def test_heads_are_their_authors(kind: Any, layers: dict[str, list[tuple[int, bool]]]) -> None:
    """Widths and biases of linear layers."""
    method = kind(backbone())
    for name, expected in layers.items():
        linear = [m for m in getattr(method, name) if isinstance(m, nn.Linear)]
        assert [(len(m.weight), m.bias is not None) for m in linear] == expected
