"""Test the step against a literal one: one graph, gradients by autograd, SGD by hand, in float64."""

from dataclasses import replace
from pathlib import Path

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

from cocor.methods import METHODS
from cocor.models import build_method, build_target
from cocor.step.step import TrainingStep


@pytest.mark.parametrize(
    "case",
    [
        "moco paper softplus exact", "moco released softplus taylor", "moco released abs exact",
        "moco paper abs taylor", "moco released softplus released", "simsiam released softplus exact",
        "simsiam paper softplus taylor", "simsiam paper abs exact", "simsiam released abs taylor",
        "simsiam paper abs released", "supcon paper softplus exact", "supcon released abs taylor",
        "byol paper softplus exact", "byol released softplus taylor", "intl paper abs exact",
        "intl released softplus exact",
    ],
)  # fmt: skip
def test_a_step_is_the_papers_algorithm(photo_folder: Path, case: str) -> None:
    options = dict(zip(("method", "recipe", "consistency", "hypergradient"), case.split(), strict=True))
    config = config_for(photo_folder, **options)
    assert_the_mmnn_has_moved(config, assert_equal_steps(config))


@pytest.mark.parametrize(
    ("method", "consistency", "decay"), [("moco", "softplus", 1e-3), ("byol", "abs", 1e-3), ("byol", "softplus", 0.0)]
)
def test_hypergradient_through_lars(photo_folder: Path, method: str, consistency: str, decay: float) -> None:
    options = {"optimiser": "lars", "decay_biases": False, "lr": 20.0, "weight_decay": decay}
    config = config_for(photo_folder, method=method, consistency=consistency, **options)
    step = assert_equal_steps(config)
    assert_the_mmnn_has_moved(config, step)
    groups = [(group["weight_decay"], {p.ndim for p in group["params"]}) for group in step.optimiser.param_groups]
    assert groups == [(decay, {2, 4}), (0.0, {1})]


@pytest.mark.parametrize("optimiser", ["sgd", "lars"])
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
