"""Test the loss of each auxiliary against its formula, written out in float64."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.steps import LABELS, images, noise_config, tiny
from torch import Tensor
from torch.nn import functional as F

from cocor.auxiliary import AUXILIARIES
from cocor.auxiliary.base import Auxiliary
from cocor.methods import method_class
from cocor.methods.base import Method
from cocor.methods.moco import MoCo
from loaders.batch import Batch
from loaders.views.parameters import PARAMETERS

B, L = 6, 2
PLACE = {name: place for place, name in enumerate(PARAMETERS)}


def made(auxiliary: str, method: str, **options: Any) -> tuple[Any, Method, Batch]:
    """An auxiliary with a method that has just computed its loss of a batch, all in float64."""
    kind = method if method not in ("split", "symmetric") else "moco"
    options = {"lengths": (1, 2), "consistency": "none"} | options
    config = noise_config(auxiliary=auxiliary, method=kind, **options)
    torch.manual_seed(1)
    network = tiny(method).double()
    extra: Auxiliary = method_class(auxiliary, AUXILIARIES)(config, network).double()
    composition = torch.zeros(L, B, 14, dtype=torch.uint8)
    composition[0, :, 3], composition[1, :, 5] = 1, 2
    parameters = torch.rand(2, B, len(PARAMETERS), generator=torch.Generator().manual_seed(4)).round(decimals=1)
    parameters[..., PLACE["flip"]] = torch.tensor([[0, 0, 1, 1, 0, 1], [0, 1, 0, 1, 0, 0]])
    parameters[..., PLACE["grey"]] = torch.tensor([[0, 0, 1, 1, 0, 1], [1, 1, 1, 1, 0, 0]])
    views = images(2, B).double(), images(B, seed=2).double(), images(L, B, seed=3).double()
    batch = Batch(*views, composition, LABELS, torch.arange(B), parameters)
    network.kept_features = []
    network.contrastive(batch.views, batch.label)
    return extra, network, batch


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
    if name in ("SupCon", "SimCLR"):
        everything = torch.cat([network.encode(images), *(network.encode(view).detach() for view in views)])
        labels = (LABELS if name == "SupCon" else torch.arange(len(images))).repeat(3)
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


@pytest.mark.parametrize("method", ["moco", "symmetric", "simsiam", "byol", "supcon", "simclr"])
def test_multiview_adds_positives(method: str) -> None:
    extra, network, batch = made("multiview", method)
    statistics = {name: value.clone() for name, value in network.named_buffers()}
    loss = extra.loss(network, batch, [])
    assert loss is not None
    assert all(torch.equal(value, statistics[name]) for name, value in network.named_buffers())
    expected = torch.stack([positive(network, images, batch.views) for images in batch.composites]).mean()
    torch.testing.assert_close(loss, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("method", ["moco", "symmetric"])
def test_clsa_compares_distributions(method: str) -> None:
    extra, network, batch = made("clsa", method)
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
    extra, network, batch = made("strongview", "moco")
    assert extra.loss(network, batch, []) is None
    views = extra.views(batch)
    assert torch.equal(views, torch.stack([batch.composites[-1], batch.views[0]]))
    assert views.movedim(2, -1).is_contiguous()


def kept(network: Method) -> list[Tensor]:
    """The features that the method has computed, and passes no more."""
    features, network.kept_features = network.kept_features, None
    assert features is not None
    return features


@pytest.mark.parametrize("method", ["moco", "symmetric", "simsiam"])
def test_augself_predicts_differences(method: str) -> None:
    every = ("crop", "color", "blur", "flip", "grey")
    extra, network, batch = made("augself", method, augself_targets=every, blur_sigma=(0.1, 4.0))
    loss = extra.loss(network, batch, kept(network))
    features = [network.backbone(images) for images in batch.views]
    assert batch.parameters is not None
    orders = [(0, 1), (1, 0)]
    inputs = torch.cat([torch.cat([features[i], features[j]], 1) for i, j in orders])
    targets: dict[str, list[list[float]]] = {name: [] for name in every}
    for i, j in orders:
        for one, other in zip(batch.parameters[i].tolist(), batch.parameters[j].tolist(), strict=True):
            a, b = (dict(zip(PARAMETERS, row, strict=True)) for row in (one, other))
            x = [1 - view["centre_x"] if a["flip"] else view["centre_x"] for view in (a, b)]
            crop = [a["centre_y"] - b["centre_y"], x[0] - x[1], a["height"] - b["height"], a["width"] - b["width"]]
            targets["crop"].append(crop)
            jitter = {"brightness": 0.8, "contrast": 0.8, "saturation": 0.8, "hue": 0.2}
            targets["color"].append([(a[name] - b[name]) / span for name, span in jitter.items()])
            targets["blur"].append([(a["blur"] - b["blur"]) / 4])
            targets["flip"].append([float(a["flip"] == b["flip"])])
            targets["grey"].append([float(a["grey"] == b["grey"])])
    expected = torch.zeros((), dtype=torch.float64)
    for name in every:
        out, target = extra.heads[name](inputs), torch.tensor(targets[name], dtype=torch.float64)
        if name in ("flip", "grey"):
            expected = expected - (target * out.sigmoid().log() + (1 - target) * (1 - out.sigmoid()).log()).mean()
        else:
            expected = expected + (out.tanh() - target).square().mean()
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)  # parameters are in float32


def test_augself_predicts_counts() -> None:
    extra, network, batch = made("augself", "simsiam", auxiliary_pairs="composites")
    loss = extra.loss(network, batch, kept(network))
    features = [network.backbone(images) for images in (batch.original, *batch.composites)]
    pairs = torch.cat([torch.cat([features[0], composite], 1) for composite in features[1:]])
    counts = torch.cat([*batch.composition]).double() / 2
    expected = (extra.heads["composition"](pairs).tanh() - counts).square().mean()
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("pairs", ["views", "composites"])
@pytest.mark.parametrize("method", ["moco", "simsiam"])
def test_equimod_predicts_displacements(method: str, pairs: str) -> None:
    extra, network, batch = made("equimod", method, auxiliary_pairs=pairs, auxiliary_temperature=0.3)
    loss = extra.loss(network, batch, kept(network))
    augmented = batch.views if pairs == "views" else batch.composites
    parameters = batch.parameters if pairs == "views" else batch.composition
    assert parameters is not None
    embedded = extra.projector(torch.cat([network.backbone(images) for images in (batch.original, *augmented)]))
    y, *moved = embedded.split(B)
    change = extra.augmentation(torch.cat([*parameters]).double())
    predicted = extra.predictor(torch.cat([torch.cat([y] * len(moved)), change], 1))
    every = unit(torch.cat([*moved, predicted]))
    terms = []
    for i, anchor in enumerate(every):
        shares = (every @ anchor / 0.3).exp()
        partner = (i + len(every) // 2) % len(every)
        terms.append(-(shares[partner] / (shares.sum() - shares[i])).log())
    torch.testing.assert_close(loss, torch.stack(terms).mean(), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("order", [1.0, 1.5, 2.0])
def test_renyicl_is_a_skew_divergence(order: float) -> None:
    extra, network, batch = made("renyicl", "moco", renyi_order=order, queue_size=64)
    loss = extra.loss(network, batch, [])
    keys = unit(network.key_head(network.key_backbone(batch.views[1])))
    queries = [network.encode(images) for images in batch.composites]
    positive = torch.cat([(one * keys).sum(1) for one in queries]) / network.temperature
    negative = torch.cat([(one @ network.queue.T).flatten() for one in queries]) / network.temperature
    mixed = (order * positive).exp().mean() / 64 + (1 - 1 / 64) * (order * negative).exp().mean()
    first = positive.mean() if order == 1 else ((order - 1) * positive).exp().mean().log() / (order - 1)
    torch.testing.assert_close(loss, mixed.log() / order - first, rtol=1e-10, atol=1e-12)


def test_stl_shares_transformations() -> None:
    """Images 0, 1, 3 and 2, 4 share a composition of length 1; image 5, and all of length 2, share none."""
    extra, network, batch = made("stl", "simsiam", auxiliary_temperature=0.3)
    batch.composition[:] = 0
    for b, op in enumerate([3, 3, 7, 3, 7, 11]):
        batch.composition[0, b, op] = 1
        batch.composition[1, b, 8] = batch.composition[1, b, b] = 1
    loss = extra.loss(network, batch, kept(network))
    original, *composites = [network.backbone(images) for images in (batch.original, *batch.composites)]
    pairs = torch.cat([torch.cat([original, composite], 1) for composite in composites])
    t = extra.transformation(pairs)
    heads = unit(extra.transformation_head(t))
    embedded = extra.projector(torch.cat([original, original, *composites]))
    source, target = embedded[:12], unit(embedded[12:])
    others = {0: [1, 3], 1: [0, 3], 3: [0, 1], 2: [4], 4: [2]}
    moved = []
    for i in range(12):
        mean = t[others[i]].mean(0) if i in others else torch.zeros(128, dtype=torch.float64)
        moved.append((extra.weights.weight @ mean).view(128, 128) @ source[i])
    every = torch.cat([target, unit(torch.stack(moved))])
    transformation = equivariance = torch.zeros((), dtype=torch.float64)
    for i, same in others.items():
        logits = heads @ heads[i] / 0.3
        rest = torch.arange(12) != i
        transformation = transformation - (logits[same] - logits[rest].logsumexp(0)).mean() / 12
        for anchor, partner in ((i, i + 12), (i + 12, i)):
            logits = every @ every[anchor] / 0.3
            rest = torch.arange(24) != anchor
            equivariance = equivariance - (logits[partner] - logits[rest].logsumexp(0)) / 10
    torch.testing.assert_close(loss, equivariance + 0.1 * transformation, rtol=1e-8, atol=1e-10)


def test_hierarchical_contrasts_stages() -> None:
    extra, network, batch = made("hierarchical", "simsiam", lengths=(2, 1), auxiliary_temperature=0.3)
    loss = extra.loss(network, batch, kept(network))

    def stages(images: Tensor) -> list[Tensor]:
        body: Any = network.backbone
        third = body.layer3(body.layer2(body.layer1(body.maxpool(body.act1(body.bn1(body.conv1(images)))))))
        return [body.layer4(third).mean((2, 3)), third.mean((2, 3))]

    counts = torch.cat([torch.zeros(B, 14), *batch.composition]).double()
    plain, *augmented = extra.augmentation(counts).split(B)
    terms = []
    for place, one in enumerate(batch.composites):  # length 2 is contrasted at the last stage
        original, composite = stages(batch.original)[place], stages(one)[place]
        rows = torch.cat([torch.cat([original, plain], 1), torch.cat([composite, augmented[place]], 1)])
        every = unit(extra.heads[place](rows))
        for i, anchor in enumerate(every):
            shares = (every @ anchor / 0.3).exp()
            terms.append(-(shares[(i + B) % (2 * B)] / (shares.sum() - shares[i])).log())
    torch.testing.assert_close(loss, torch.stack(terms).mean(), rtol=1e-8, atol=1e-10)


def test_looc_tells_one_part_apart() -> None:
    extra, network, batch = made("looc", "moco", embedding_dim=8, queue_size=32)
    assert isinstance(network, MoCo)
    batch = replace(batch, kept=images(2, B, seed=5).double())
    loss = extra.loss(network, batch, kept(network))
    query, expected, enqueued = network.backbone(batch.views[0]), [], []
    for space, (head, key_head) in enumerate(zip(extra.heads, extra.key_heads, strict=True)):
        asked = unit(head(query))
        keys = [unit(key_head(network.key_backbone(one))) for one in (batch.views[1], *batch.kept)]
        logits = torch.stack([(asked * key).sum(1) for key in keys], 1)
        shares = (torch.cat([logits, asked @ extra.queues[space].T], 1) / network.temperature).softmax(1)
        expected.append(-shares[:, 1 + space].log().mean())
        enqueued.append(keys[1 + space])
    torch.testing.assert_close(loss, torch.stack(expected).sum(), rtol=1e-10, atol=1e-12)
    before = extra.queues.clone()
    with torch.no_grad():
        extra.heads[0][0].weight.add_(1.0)
    key_weight = extra.key_heads[0][0].weight.clone()
    extra.after_step(network)
    torch.testing.assert_close(extra.queues[:, :B], torch.stack(enqueued))
    assert torch.equal(extra.queues[:, B:], before[:, B:]) and extra.pointer == B
    torch.testing.assert_close(extra.key_heads[0][0].weight, key_weight + (1 - network.momentum))
