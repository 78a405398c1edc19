"""Test the step against a literal one: one graph, gradients by autograd, SGD by hand, in float64."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.steps import (
    WORLD,
    assert_equal_steps,
    assert_the_mmnn_has_moved,
    build,
    config_for,
    noise,
    noise_config,
    noise_step,
)
from torch import Tensor

from cocor.methods import METHODS
from cocor.models import build_method, build_target
from cocor.step.optim import build_optimiser
from cocor.step.step import TrainingStep
from loaders.errors import UserError


@pytest.mark.parametrize(
    "case",
    [
        "moco paper softplus exact", "moco released softplus taylor", "moco released abs exact",
        "moco paper abs taylor", "moco released softplus released", "simsiam released softplus exact",
        "simsiam paper softplus taylor", "simsiam paper abs exact", "simsiam released abs taylor",
        "simsiam paper abs released", "supcon paper softplus exact", "supcon released abs taylor",
        "byol paper softplus exact", "byol released softplus taylor", "intl paper abs exact",
        "intl released softplus exact", "simclr paper softplus exact", "barlow paper softplus exact",
        "barlow paper abs exact", "vicreg released softplus exact", "vicreg paper abs taylor",
    ],
)  # fmt: skip
def test_a_step_is_the_papers_algorithm(photo_folder: Path, case: str) -> None:
    options = dict(zip(("method", "recipe", "consistency", "hypergradient"), case.split(), strict=True))
    config = config_for(photo_folder, **options)
    assert_the_mmnn_has_moved(config, assert_equal_steps(config))


@pytest.mark.parametrize("method", ["moco", "simsiam"])
@pytest.mark.parametrize(
    ("optimiser", "rate", "hypergradient"),
    [("adam", 0.02, "exact"), ("normalised", 5.0, "exact"), ("normalised", 5.0, "taylor")],
)
def test_the_mmnns_optimisers(photo_folder: Path, method: str, optimiser: str, rate: float, hypergradient: str) -> None:
    options = {"mmnn_optimiser": optimiser, "mmnn_lr": rate, "hypergradient": hypergradient}
    config = config_for(photo_folder, method=method, mmnn_shape="monotone", **options)
    assert_the_mmnn_has_moved(config, assert_equal_steps(config))


@pytest.mark.parametrize(
    "options", [{"method": "moco", "symmetric": True}, {"method": "simsiam", "projector_layers": 2}]
)
def test_variants_of_methods(photo_folder: Path, options: dict[str, Any]) -> None:
    for hypergradient in ("exact", "taylor"):
        config = config_for(photo_folder, queue_size=36, hypergradient=hypergradient, **options)
        assert_the_mmnn_has_moved(config, assert_equal_steps(config))


@pytest.mark.parametrize("optimiser", ["adam", "normalised", "sgd"])
def test_mmnn_steps_ignore_rate_and_weight(photo_folder: Path, optimiser: str) -> None:
    """One step from equal networks: all else equal, only SGD's is proportional to the encoder's rate and the weight."""

    def moved(**options: float) -> Tensor:
        rate = 1e6 if optimiser == "sgd" else 0.01
        step, pairs = build(config_for(photo_folder, mmnn_optimiser=optimiser, mmnn_lr=rate, **options), 1)
        assert step.target is not None
        before = [p.detach().clone() for p in step.target.parameters()]
        step(*pairs[0], 0)
        changes = zip(step.target.parameters(), before, strict=True)
        return torch.cat([(p.detach() - old).flatten() for p, old in changes])

    # Rates so small that the encoder stays where it is.
    one, other = moved(lr=1e-9, consistency_weight=1e-2), moved(lr=2e-9, consistency_weight=4e-2)
    assert float(one.abs().max()) > 0
    expected = one * (8 if optimiser == "sgd" else 1)
    torch.testing.assert_close(other, expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max()))


def test_products_and_movement_are_reported(photo_folder: Path) -> None:
    config = config_for(photo_folder, mmnn_optimiser="adam", mmnn_lr=0.02)
    step, pairs = build(config, 3)
    start = copy.deepcopy(step.target)
    for number, (batch, labelled) in enumerate(pairs):
        assert start is not None and step.target is not None
        with torch.no_grad():
            expected = (step.target(batch.composition) - start(batch.composition)).mean(1)
        metrics = step(batch, labelled, number)
        for length in config.lengths:
            assert float(metrics[f"target_moved_{length}"] - expected[length - 1]) == pytest.approx(0, abs=1e-6)
            product = metrics[f"product_{length}"]
            assert metrics[f"product_squared_{length}"] == product**2
            assert metrics[f"product_positive_{length}"] == float(product > 0)
    assert float(expected.abs().max()) > 1e-3


@pytest.mark.parametrize("optimiser", ["adam", "normalised"])
def test_the_mmnns_optimiser_resumes(photo_folder: Path, optimiser: str) -> None:
    config = config_for(photo_folder, mmnn_optimiser=optimiser, mmnn_lr=0.02)
    (through, pairs), (first, _), (second, _) = build(config, 3), build(config, 3), build(config, 3)
    for number, pair in enumerate(pairs):
        through(*pair, number)
        if number < 2:
            first(*pair, number)
    state = copy.deepcopy(first.state_dict())
    for group in state["mmnn_optimiser"]["param_groups"]:
        group |= {"fused": True, "capturable": True} if optimiser == "adam" else {"fused": True}  # as saved on a GPU
    second.load_state_dict(state)
    second(*pairs[2], 2)
    for a, b in zip(through.weights(), second.weights(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("method", "consistency", "decay"),
    [("moco", "softplus", 1e-3), ("byol", "abs", 1e-3), ("barlow", "softplus", 1e-3), ("byol", "softplus", 0.0)],
)
def test_hypergradient_through_lars(photo_folder: Path, method: str, consistency: str, decay: float) -> None:
    options = {"optimiser": "lars", "decay_biases": False, "lr": 20.0, "weight_decay": decay}
    config = config_for(photo_folder, method=method, consistency=consistency, **options)
    step = assert_equal_steps(config)
    assert_the_mmnn_has_moved(config, step)
    groups = [(group["weight_decay"], {p.ndim for p in group["params"]}) for group in step.optimiser.param_groups]
    assert groups == [(decay, {2, 4}), (0.0, {1})]


@pytest.mark.parametrize("consistency", ["softplus", "abs"])
@pytest.mark.parametrize(
    "options",
    [
        {"optimiser": "adamw", "lr": 1e-3, "weight_decay": 0.1}, {"clip_grad": 0.5}, {"clip_grad": 1e3},
        {"optimiser": "adamw", "lr": 1e-3, "clip_grad": 0.5, "method": "simsiam"},
    ],
    ids=str,
)  # fmt: skip
def test_hypergradient_of_adamw_and_clipping(photo_folder: Path, options: dict[str, Any], consistency: str) -> None:
    config = config_for(photo_folder, consistency=consistency, **options)
    assert_the_mmnn_has_moved(config, assert_equal_steps(config))


def test_adamw_leaves_embeddings_of_places_alone() -> None:
    method = build_method(noise_config(backbone="test_vit", optimiser="adamw"), WORLD)
    names = {id(p): name for name, p in method.named_parameters()}
    groups = build_optimiser(noise_config(optimiser="adamw"), method).param_groups
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    decayed, rest = ([names[id(p)] for p in group["params"]] for group in groups)
    assert all(name.endswith("weight") and "norm" not in name for name in decayed)
    assert {"backbone.cls_token", "backbone.pos_embed", "backbone.norm.weight", "head.0.bias"} <= set(rest)


def test_clipping_is_reported_and_refused_with_lars(photo_folder: Path) -> None:
    step, pairs = build(config_for(photo_folder, clip_grad=0.25), 1)
    norm = step(*pairs[0], 0)["gradient_norm"]
    clipped = torch.cat([p.grad.flatten() for p in step.parameters if p.grad is not None]).norm()
    assert norm > 0.25 and float(clipped) == pytest.approx(0.25)
    with pytest.raises(UserError, match="clip_grad: LARS sets the size"):
        config_for(photo_folder, optimiser="lars", clip_grad=1.0)


@pytest.mark.parametrize("optimiser", ["sgd", "lars", "adamw"])
def test_frozen_weights_stay(optimiser: str) -> None:
    config = noise_config(optimiser=optimiser)
    method = build_method(config, WORLD)
    frozen = next(method.backbone.parameters()).requires_grad_(False)
    before = frozen.clone()
    step = TrainingStep(config, method, build_target(config, WORLD), 5, steps_per_epoch=40)
    for number, (batch, labelled) in enumerate(noise(config, 2)):
        assert step(batch, labelled, number)["hypergradient_norm"] > 0
    assert torch.equal(frozen, before)


def test_abs_loss_in_bfloat16_on_the_cpu() -> None:
    """There a convolution of two precisions has no forward-mode derivative."""
    config = noise_config(consistency="abs")
    batch, labelled = next(noise(config, 1))
    batch = replace(batch, composites=batch.composites.bfloat16())
    norm = noise_step(config, precision=torch.bfloat16)(batch, labelled, 0)["hypergradient_norm"]
    assert norm.isfinite() and norm > 0


EVERY_METHOD = pytest.mark.parametrize("method", METHODS)


@EVERY_METHOD
def test_constant_targets(photo_folder: Path, method: str) -> None:
    step = assert_equal_steps(config_for(photo_folder, method=method, mmnn="constants"))
    assert step.outer is None and set(step.state_dict()) == {"method", "optimiser"}


@EVERY_METHOD
def test_plain_method(photo_folder: Path, method: str) -> None:
    config = config_for(photo_folder, method=method, consistency="none")
    step, pairs = build(config)
    assert all(len(batch.original) == len(batch.composites) == 0 and labelled is None for batch, labelled in pairs)
    metrics = step(*pairs[0], 0)
    assert torch.equal(metrics["loss"], metrics["contrastive_loss"])
    assert_equal_steps(config)
