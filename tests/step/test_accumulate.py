"""Test that a batch in parts makes the step of the whole one, where that is defined."""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.steps import assert_the_mmnn_has_moved, build, config_for
from torch import Tensor

from cocor.config.resolve import resolve
from cocor.step.step import TrainingStep
from loaders.errors import UserError


def made(folder: Path, parts: int, **options: Any) -> tuple[TrainingStep, dict[str, Tensor]]:
    """Two steps in float64; the metrics of the last."""
    step, pairs = build(config_for(folder, accumulate=parts, **options))
    for number, (batch, labelled) in enumerate(pairs):
        metrics = step(batch, labelled, number)
    return step, metrics


@pytest.mark.parametrize("options", [
    {"consistency": "none"}, {"mmnn": "constants", "consistency": "abs"}, {}, {"optimiser": "adamw", "lr": 1e-3},
    {"recipe": "released", "clip_grad": 0.1},
], ids=str)  # fmt: skip
def test_parts_make_the_step_of_the_whole(photo_folder: Path, options: dict[str, Any]) -> None:
    """Of a network without BatchNorm: weights, moments, queue, targets and hyper-gradient."""
    network = {"backbone": "test_vit", "key_bn_splits": 1}
    (whole, expected), (parts, metrics) = (made(photo_folder, count, **network, **options) for count in (1, 4))
    for one, other in zip(parts.weights(), whole.weights(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(parts.method.queue, whole.method.queue, rtol=1e-8, atol=1e-10)
    assert metrics.keys() == expected.keys()
    for name in metrics.keys() - {"contrastive_feature_std"}:  # of each part
        torch.testing.assert_close(metrics[name], expected[name], rtol=1e-7, atol=1e-9, msg=name)
    if whole.outer is not None:
        assert_the_mmnn_has_moved(whole.config, parts)


@pytest.mark.parametrize("method", ["simsiam", "byol"])
def test_batch_norm_sees_the_parts(photo_folder: Path, method: str) -> None:
    config = config_for(photo_folder, method=method, consistency="none", accumulate=2)
    step, [(batch, labelled)] = build(config, 1)
    halves = [step.method.contrastive(batch.views[:, cut]) for cut in (slice(4), slice(4, 8))]
    expected = torch.autograd.grad((halves[0] + halves[1]) / 2, step.parameters)
    assert torch.allclose(step(batch, labelled, 0)["loss"], (halves[0] + halves[1]) / 2)
    for parameter, gradient in zip(step.parameters, expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize(("options", "words"), [
    ({"method": "simclr"}, r"accumulate: simclr compares the images .* use moco\|simsiam\|byol"),
    ({"hypergradient": "taylor"}, "accumulate: .* use softplus and exact, or --mmnn constants"),
    ({"consistency": "abs"}, "accumulate: --consistency abs"),
    ({"auxiliary": "clsa"}, "accumulate: --auxiliary clsa takes the whole batch"),
    ({"batch_size": 12}, "accumulate: the 12 images of a rank are not 8 equal parts of 2 or more"),
    ({"batch_size": 64, "key_bn_splits": 8}, "key_bn_splits: 8 does not cut 8 images on 1 ranks .* try 4"),
])  # fmt: skip
def test_what_parts_cannot_do_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        resolve({"accumulate": 8, **options})
