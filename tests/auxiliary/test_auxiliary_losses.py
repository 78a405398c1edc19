"""Test the loss of each auxiliary against its formula, written out in float64."""

from typing import Any

import pytest
import torch
from helpers.steps import LABELS, images, noise_config, tiny
from torch import Tensor
from torch.nn import functional as F

from cocor.auxiliary import AUXILIARIES
from cocor.auxiliary.base import Auxiliary
from cocor.config.options import Config
from cocor.methods import method_class
from cocor.methods.base import Method
from cocor.methods.moco import MoCo
from loaders.batch import Batch

B, L = 6, 2


def made(auxiliary: str, method: str, **options: Any) -> tuple[Auxiliary, Method, Batch, Config]:
    """An auxiliary with a method that has just computed its loss of a batch, all in float64."""
    kind = method if method not in ("split", "symmetric") else "moco"
    options |= {"lengths": (1, 2), "consistency": "none"}
    config = noise_config(auxiliary=auxiliary, method=kind, **options)
    torch.manual_seed(1)
    network = tiny(method).double()
    extra: Auxiliary = method_class(auxiliary, AUXILIARIES)(config, network).double()
    composition = torch.zeros(L, B, 14, dtype=torch.uint8)
    composition[0, :, 3], composition[1, :, 5] = 1, 2
    views = images(2, B).double(), images(B, seed=2).double(), images(L, B, seed=3).double()
    batch = Batch(*views, composition, LABELS, torch.arange(B))
    network.contrastive(batch.views, batch.label)
    return extra, network, batch, config


def unit(tensor: Tensor) -> Tensor:
    return F.normalize(tensor, dim=1)


def info_nce(network: Any, queries: Tensor, keys: Tensor) -> Tensor:
    logits = torch.cat([(queries * keys).sum(1, keepdim=True), queries @ network.queue.T], 1) / network.temperature
    return F.cross_entropy(logits, torch.zeros(len(queries), dtype=torch.int64))


def positive(network: Any, images: Tensor, views: Tensor) -> Tensor:
    """The loss of one more view."""
    name = type(network).__name__
    if name == "MoCo":
        queries = unit(network.head(network.backbone(images)))
        keyed = views.flip(0)[: 1 + network.symmetric]
        keys = [unit(network.key_head(network.key_backbone(view))) for view in keyed]
        return torch.stack([info_nce(network, queries, key.detach()) for key in keys]).mean()
    if name == "SupCon":
        everything = torch.cat([network.encode(images), *(network.encode(view).detach() for view in views)])
        labels = LABELS.repeat(3)
        loss = torch.zeros((), dtype=torch.float64)
        for i, anchor in enumerate(everything):
            others = torch.arange(len(labels)) != i
            logits = everything @ anchor / network.temperature
            same = others & (labels == labels[i])
            loss = loss - (logits[same] - logits[others].logsumexp(0)).mean() / len(labels)
        return loss
    prediction = unit(network.predictor(network.projector(network.backbone(images))))
    if name == "SimSiam":
        return -sum((prediction * unit(network.projector(network.backbone(v)))).sum(1).mean() / 2 for v in views)
    targets = [unit(network.target_projector(network.target_backbone(view))) for view in views]
    return sum((prediction - target).square().sum(1).mean() for target in targets)


@pytest.mark.parametrize("method", ["moco", "symmetric", "simsiam", "byol", "supcon"])
def test_multiview_adds_positives(method: str) -> None:
    extra, network, batch, _ = made("multiview", method)
    statistics = {name: value.clone() for name, value in network.named_buffers()}
    loss = extra.loss(network, batch, [])
    assert loss is not None
    assert all(torch.equal(value, statistics[name]) for name, value in network.named_buffers())
    expected = torch.stack([positive(network, images, batch.views) for images in batch.composites]).mean()
    torch.testing.assert_close(loss, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("method", ["moco", "symmetric"])
def test_clsa_compares_distributions(method: str) -> None:
    extra, network, batch, _ = made("clsa", method)
    assert isinstance(network, MoCo)

    def distribution(images: Tensor, key: Tensor) -> Tensor:
        queries, keys = network.encode(images), unit(network.key_head(network.key_backbone(key)))
        logits = torch.cat([(queries * keys).sum(1, keepdim=True), queries @ network.queue.T], 1)
        return (logits / network.temperature).exp() / (logits / network.temperature).exp().sum(1, keepdim=True)

    views, terms = batch.views, []
    for weak, key in [(views[0], views[1]), (views[1], views[0])][: 1 + network.symmetric]:
        for strong in batch.composites:
            terms.append(-(distribution(weak, key) * distribution(strong, key).log()).sum(1).mean())
    loss = extra.loss(network, batch, [])
    torch.testing.assert_close(loss, torch.stack(terms).mean(), rtol=1e-10, atol=1e-12)


def test_strongview_contrasts_a_composite() -> None:
    extra, network, batch, _ = made("strongview", "moco")
    assert extra.loss(network, batch, []) is None
    views = extra.views(batch)
    assert torch.equal(views, torch.stack([batch.composites[-1], batch.views[0]]))
    assert views.movedim(2, -1).is_contiguous()
