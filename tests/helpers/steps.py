"""Small methods and steps, on noise and on photographs, and a literal transcription of the step."""

import copy
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cocor.config.options import Config
from cocor.config.resolve import resolve
from cocor.data import labelled_loader, open_data, training_loader
from cocor.distributed.collectives import World
from cocor.methods.barlow import BIAS_SHARE, BarlowTwins
from cocor.methods.base import Method, batch_statistics_only
from cocor.methods.byol import BYOL
from cocor.methods.intl import INTL
from cocor.methods.moco import MoCo
from cocor.methods.simclr import SimCLR
from cocor.methods.simsiam import SimSiam
from cocor.methods.supcon import SupCon
from cocor.methods.vicreg import VICReg
from cocor.models import build_auxiliary, build_method, build_target
from cocor.step.step import TrainingStep
from loaders.batch import Batch
from loaders.views.parameters import PARAMETERS

WORLD, GPU = World(0, 0, 1, torch.device("cpu")), World(0, 0, 1, torch.device("cuda"))
EPOCH, STEPS = 3, 2  # steps of an epoch and steps that are compared
EPSILON = 0.05  # of the smoothed modulus
CLASSES = 5  # of noise
LABELS = torch.tensor([0, 1, 0, 2, 1, 0])
Pairs = list[tuple[Batch, Batch | None]]


def backbone() -> nn.Module:
    torch.manual_seed(0)
    return timm.create_model("test_resnet", num_classes=0, zero_init_last=False)  # or inner layers get no gradient yet


TINY: dict[str, tuple[type[Method], dict[str, Any]]] = {
    "moco": (MoCo, {"embedding_dim": 8, "queue_size": 24, "key_bn_splits": 1}),
    "split": (MoCo, {"embedding_dim": 8, "queue_size": 24, "key_bn_splits": 2}),
    "symmetric": (MoCo, {"embedding_dim": 8, "queue_size": 24, "key_bn_splits": 1, "symmetric": True}),
    "simsiam": (SimSiam, {"projector_dim": 16, "predictor_dim": 8}), "supcon": (SupCon, {"embedding_dim": 8}),
    "byol": (BYOL, {"embedding_dim": 16, "projector_dim": 24, "predictor_dim": 8, "key_momentum": 0.9}),
    "intl": (INTL, {"embedding_dim": 16, "projector_dim": 24, "trace_weight": 0.05}),
    "simclr": (SimCLR, {"embedding_dim": 8}), "barlow": (BarlowTwins, {"embedding_dim": 16, "projector_dim": 24}),
    "vicreg": (VICReg, {"embedding_dim": 16, "projector_dim": 24}),
}  # fmt: skip


def tiny(name: str, **options: Any) -> Any:
    """Build a method of :data:`TINY`."""
    kind, usual = TINY[name]
    method = kind(backbone(), **usual | options)
    method.total_steps = 10
    return method


def images(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, 3, 32, 32, generator=torch.Generator().manual_seed(seed))


def noise_config(**options: object) -> Config:
    values = {
        "backbone": "test_resnet", "image_size": 32, "batch_size": 16, "queue_size": 64, "key_bn_splits": 2,
        "embedding_dim": 16, "projector_dim": 32, "predictor_dim": 16, "epochs": 1, "mmnn_wait_epochs": 0,
        "mmnn_warmup_epochs": 0, "lr": 0.05, "precision": "fp32",
    }  # fmt: skip
    return resolve(values | options)


def noise_step(config: Config, world: World = WORLD, precision: torch.dtype = torch.float32) -> TrainingStep:
    method, target = build_method(config, world), build_target(config, world)
    auxiliary = build_auxiliary(config, method, world)
    return TrainingStep(config, method, target, CLASSES, steps_per_epoch=40, precision=precision, auxiliary=auxiliary)


def noise(config: Config, count: int, device: torch.device = WORLD.device) -> Iterator[tuple[Batch, Batch]]:
    """Batches of noise on the device, other in every step."""
    generator = torch.Generator(device).manual_seed(1)
    lengths = len(config.lengths) if config.has_composites else 0

    def images(*shape: int) -> Tensor:
        return torch.randn(*shape, 32, 32, 3, device=device, generator=generator).movedim(-1, -3)

    for step in range(count):
        size, few = config.batch_size, 6
        composition = torch.zeros(lengths, size, 14, dtype=torch.uint8, device=device)
        for at in range(lengths):
            composition[at, :, step % 14] = at + 1
        label = torch.arange(size, device=device) % CLASSES
        originals = size if config.has_composites or config.has_center else 0
        batch = Batch(images(2, size), images(originals), images(lengths, size), composition, label, label + step)
        if config.has_parameters:
            parameters = torch.rand(2, size, len(PARAMETERS), device=device, generator=generator)
            batch = replace(batch, parameters=parameters.round(decimals=1))
        if config.kept_parts:
            batch = replace(batch, kept=images(len(config.kept_parts), size))
        yield (
            batch,
            Batch(images(0, few), images(few), images(0, few), composition[:0, :few], label[:few], label[:few]),
        )


def config_for(folder: Path, **options: object) -> Config:
    """A run of one epoch of three steps, in which the MMNN and its classifier learn visibly from the start."""
    small: dict = {
        "data": folder, "loader": "torch", "backbone": "test_resnet", "image_size": 32, "batch_size": 8,
        "labelled_batch_size": 6, "label_fraction": 0.5, "epochs": 1, "lr": 0.2, "final_lr": 0.0, "optimiser": "sgd",
        "weight_decay": 1e-2, "queue_size": 20, "key_bn_splits": 2, "embedding_dim": 12, "projector_dim": 16,
        "predictor_dim": 8, "released_originals": 2, "consistency_weight": 0.7, "consistency_beta": 2.0,
        "mmnn_optimiser": "sgd", "mmnn_lr": 5.0, "mmnn_wait_epochs": 0, "mmnn_warmup_epochs": 0,
    }  # fmt: skip
    return resolve(small | options)


def wake(method: Method) -> None:
    """Raise the weights that timm starts at 0, behind which nothing would learn."""
    with torch.no_grad():
        for name, parameter in method.named_parameters():
            if parameter.ndim == 1 and not parameter.any() and "weight" in name:
                parameter.fill_(0.5)


def build(config: Config, steps: int = STEPS) -> tuple[TrainingStep, Pairs]:
    """A step in float64 and the first ``steps`` batches of its epoch, each with a labelled one, from real files."""
    data = open_data(config)
    unlabelled = training_loader(config, data, WORLD, torch.float64)
    every_step = replace(config, mmnn_every=1)
    labelled = labelled_loader(every_step, data, WORLD, torch.float64, unlabelled.steps_per_epoch)
    method, target = build_method(config, WORLD), build_target(config, WORLD)
    wake(method)
    classes = len(data.train.classes) if labelled is not None else None
    step = TrainingStep(config, method, target, classes, steps_per_epoch=unlabelled.steps_per_epoch)
    for module in (step.method, step.target, step.outer and step.outer.classifier):
        if module is not None:
            module.double()
    with closing(unlabelled):  # type: ignore[type-var]
        batches = list(unlabelled.epoch(0))
    others: list = [None] * len(batches) if labelled is None else list(labelled.epoch(0))
    assert len(batches) == EPOCH
    return step, list(zip(batches, others, strict=True))[:steps]


class Sgd:
    """``buffer = momentum buffer + gradient + decay weight; weight -= lr buffer``, without writing in place.

    LARS scales what joins the buffer by a factor of each weight, which does not depend on the MMNN.
    """

    def __init__(self, momentum: float, decay: float, biases: bool = True, lars: bool = False) -> None:
        self.momentum, self.decay, self.biases, self.lars, self.buffers = momentum, decay, biases, lars, {}

    def step(self, weights: dict[str, Tensor], gradients: dict[str, Tensor], lr: Callable[[str], float]) -> dict:
        new = {}
        for name, weight in weights.items():
            decay = self.decay if self.biases or weight.ndim > 1 else 0.0
            change = gradients[name] + decay * weight
            if self.lars and (self.biases or weight.ndim > 1):
                norms = weight.norm().item(), gradients[name].norm().item()
                change = change * (0.001 * norms[0] / (norms[1] + decay * norms[0] + 1e-8) if all(norms) else 1.0)
            buffer = self.momentum * self.buffers[name] + change if name in self.buffers else change
            new[name] = weight - lr(name) * buffer
            self.buffers[name] = buffer.detach()
        return new


class Adam:
    """Kingma and Ba's algorithm 1, without writing in place; ``decay``, apart from the gradient, is AdamW's."""

    def __init__(self, momentum: float, decay: float = 0.0) -> None:
        self.momentum, self.decay, self.time, self.first, self.second = momentum, decay, 0, {}, {}

    def step(self, weights: dict[str, Tensor], gradients: dict[str, Tensor], lr: Callable[[str], float]) -> dict:
        new, b1, b2 = {}, self.momentum, 0.999
        self.time += 1
        for name, weight in weights.items():
            first = b1 * self.first.get(name, 0.0) + (1 - b1) * gradients[name]
            second = b2 * self.second.get(name, 0.0) + (1 - b2) * gradients[name] ** 2
            mean, square = first / (1 - b1**self.time), second / (1 - b2**self.time)
            root = torch.where(square > 0, torch.where(square > 0, square, 1.0).sqrt(), 0.0)  # whose derivative is 0
            decay = self.decay if weight.ndim > 1 else 0.0
            new[name] = weight * (1 - lr(name) * decay) - lr(name) * mean / (root + 1e-8)
            self.first[name], self.second[name] = first.detach(), second.detach()
        return new


def trained(module: nn.Module) -> dict[str, Tensor]:
    return {name: p for name, p in module.named_parameters() if p.requires_grad}


def assign(module: nn.Module, weights: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for name, parameter in trained(module).items():
            parameter.copy_(weights[name])


class Literal:
    """The paper's algorithm 1 on copies of a step's networks."""

    def __init__(self, step: TrainingStep) -> None:
        self.config = step.config
        self.method: Method = copy.deepcopy(step.method)
        self.mmnn = copy.deepcopy(step.target)
        self.classifier = copy.deepcopy(step.outer and step.outer.classifier)
        config = self.config
        lars = config.optimiser == "lars"
        self.encoder_optimiser: Any = Sgd(config.momentum, config.weight_decay, config.decay_biases, lars)
        if config.optimiser == "adamw":
            self.encoder_optimiser = Adam(config.momentum, config.weight_decay)
        adam = config.mmnn_optimiser == "adam"
        self.mmnn_optimiser = Adam(config.mmnn_momentum) if adam else Sgd(config.mmnn_momentum, 0.0)
        self.classifier_sgd = Sgd(0.9, config.classifier_weight_decay)

    def cosine(self, number: int) -> float:
        return 0.5 * (1 + torch.cos(torch.tensor(torch.pi * number / EPOCH, dtype=torch.float64)).item())

    def similarity(self, batch: Batch) -> Tensor:
        """(L, B)"""
        views = self.method.embed_original(batch.original).chunk(len(batch.original) // len(batch.index))
        original = F.normalize(torch.stack(views).mean(0), dim=1)
        return torch.stack([(self.method.embed_composite(images) * original).sum(1) for images in batch.composites])

    def consistency(self, similarity: Tensor, target: Tensor) -> Tensor:
        if self.config.consistency == "abs":
            return (((similarity - target) ** 2 + EPSILON**2).sqrt() - EPSILON).mean()
        beta, gap = self.config.consistency_beta, target.mean(1) - similarity.mean(1)
        return ((1 + (beta * gap).exp()).log() / beta).mean()

    def cross_entropy(self, labelled: Batch, weights: dict[str, Tensor]) -> Tensor:
        inside = {n.removeprefix("backbone."): w for n, w in weights.items() if n.startswith("backbone.")}
        with batch_statistics_only(self.method.backbone):
            features = torch.func.functional_call(self.method.backbone, inside, (labelled.original,))
        return F.cross_entropy(self.classifier(features), labelled.label)

    def __call__(self, batch: Batch, labelled: Batch | None, number: int) -> dict[str, Tensor]:
        config, theta = self.config, trained(self.method)
        loss = contrastive = self.method.contrastive(batch.views, batch.label)
        target = similarity = None
        if self.mmnn is not None:
            target, similarity = self.mmnn(batch.composition), self.similarity(batch)
            loss = contrastive + config.consistency_weight * self.consistency(similarity, target)
        gradient = torch.autograd.grad(loss, list(theta.values()), create_graph=True)
        if config.clip_grad:
            norm = sum(part.square().sum() for part in gradient).sqrt()
            gradient = [part * (config.clip_grad / norm).clamp(max=1) for part in gradient]

        def rate(name: str) -> float:
            fixed = config.method == "simsiam" and name.startswith("predictor.") and config.fix_predictor_lr
            slow = (config.method, config.optimiser) == ("barlow", "lars") and theta[name].ndim == 1
            share = BIAS_SHARE if slow else 1.0
            return share * config.lr * (1.0 if fixed else self.cosine(number))

        new = self.encoder_optimiser.step(theta, dict(zip(theta, gradient, strict=True)), rate)
        known = {"loss": loss.detach()}
        if self.classifier is not None:
            known |= self.bilevel(batch, labelled, loss, target, similarity, new, number)
        assign(self.method, new)
        self.method.after_step()
        return known

    def bilevel(self, batch, labelled, loss, target, similarity, new, number) -> dict[str, Tensor]:
        config = self.config
        phi, psi = trained(self.mmnn), trained(self.classifier)
        cross_entropy = self.cross_entropy(labelled, new)
        psi_gradient = torch.autograd.grad(cross_entropy, list(psi.values()), retain_graph=True)
        if config.hypergradient == "exact":
            phi_gradient = torch.autograd.grad(cross_entropy, list(phi.values()))
        else:
            phi_gradient = self.taylor(batch, labelled, loss, target, similarity, new, cross_entropy)
        over = 1.0
        if config.mmnn_optimiser != "sgd":
            over = config.lr * self.cosine(number) * config.consistency_weight
        named = dict(zip(phi, [gradient / over for gradient in phi_gradient], strict=True))
        updated = self.mmnn_optimiser.step(phi, named, lambda _: config.mmnn_lr * self.cosine(number))
        named = dict(zip(psi, psi_gradient, strict=True))
        heads = self.classifier_sgd.step(psi, named, lambda _: config.classifier_lr * self.cosine(number))
        assign(self.mmnn, updated)
        assign(self.classifier, heads)
        norm = torch.stack([g.norm() for g in phi_gradient]).norm()
        return {"labelled_loss": cross_entropy.detach(), "hypergradient_norm": norm}

    def taylor(self, batch, labelled, loss, target, similarity, new, cross_entropy) -> list[Tensor]:
        """Paper, eq. 12, sign mended: ``-dCE sum_l w c_l (d sim_l / dL) d mean g_l``, c by the loss before the step.

        The released code has the other sign, and c by the loss behind the step.
        """
        old = {name: p.detach().clone() for name, p in trained(self.method).items()}
        before = self.cross_entropy(labelled, old).detach()
        assign(self.method, new)
        with torch.no_grad():
            moved = self.similarity(batch)
            after = self.method.reevaluate(batch.views, batch.label)
            after = after + self.config.consistency_weight * self.consistency(moved, target)
        assign(self.method, old)
        assert abs(after - loss) > 1e-3
        factor = self.config.consistency_weight * (cross_entropy - before) / (after - loss)
        similarity = similarity.detach()
        there = similarity
        if self.config.hypergradient == "released":
            factor, there = -factor, moved
        if self.config.consistency == "abs":
            curvature = EPSILON**2 / ((there - target) ** 2 + EPSILON**2) ** 1.5 / target.numel()
            surrogate = -(factor * curvature * (moved - similarity)).detach() * target
        else:
            beta, gap = self.config.consistency_beta, target.mean(1) - there.mean(1)
            curvature = beta * torch.sigmoid(beta * gap) * torch.sigmoid(-beta * gap) / len(target)
            surrogate = -(factor * curvature * (moved - similarity).mean(1)).detach() * target.mean(1)
        return list(torch.autograd.grad(surrogate.sum(), list(trained(self.mmnn).values())))


def assert_equal_steps(config: Config, steps: int = STEPS, written: type[Literal] = Literal) -> TrainingStep:
    """Make steps of an epoch both ways; compare every weight and buffer after each."""
    step, pairs = build(config, steps)
    literal = written(step)
    for number, (batch, labelled) in enumerate(pairs):
        metrics, expected = step(batch, labelled, number), literal(batch, labelled, number)
        for name, value in expected.items():
            torch.testing.assert_close(metrics[name], value, rtol=1e-8, atol=1e-10)
        modules = [(step.method, literal.method), (step.target, literal.mmnn)]
        modules.append((step.outer and step.outer.classifier, literal.classifier))
        for fused, plain in modules:
            if fused is not None:
                found, wanted = fused.state_dict(), plain.state_dict()
                assert found.keys() == wanted.keys()
                for name, value in found.items():
                    torch.testing.assert_close(value, wanted[name], rtol=1e-7, atol=1e-9, msg=name)
    assert step.learning_rate == pytest.approx(config.lr * literal.cosine(steps - 1))
    return step


def assert_the_mmnn_has_moved(config: Config, step: TrainingStep) -> None:
    """The comparison was not of zeros."""
    fresh = build_target(config, WORLD)
    assert fresh is not None and step.target is not None
    pairs = zip(fresh.double().parameters(), step.target.parameters(), strict=True)
    assert max((a - b).abs().max().item() for a, b in pairs) > 1e-4
