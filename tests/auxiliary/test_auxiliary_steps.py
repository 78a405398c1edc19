"""Test steps with each auxiliary: what learns, what is refused, and whole runs."""

import copy
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import runs
from helpers.runs import Capture
from helpers.steps import noise, noise_config, noise_step

from cocor.auxiliary import AUXILIARIES
from cocor.config.resolve import load
from cocor.methods import METHODS, Spec, method_class, spec
from cocor.monitor import profile
from cocor.step.compile import compile_backbones
from cocor.train import main
from loaders.errors import UserError

NAMES = list(AUXILIARIES)[1:]
EACH = pytest.mark.parametrize("auxiliary", NAMES)


def fitting(auxiliary: str) -> str:
    """The last method that the auxiliary goes with."""
    able = []
    for method in METHODS:
        try:
            able.append(noise_config(auxiliary=auxiliary, method=method, consistency="none").method)
        except UserError:
            continue
    return able[-1]


@EACH
def test_declarations_are_read_from_the_source(auxiliary: str) -> None:
    made = method_class(auxiliary, AUXILIARIES)
    declared = {key.name: getattr(made, key.name, key.default) for key in fields(Spec)[3:]}
    assert spec(auxiliary, AUXILIARIES) == Spec(made.__name__, made.defaults, made.options, **declared)


@EACH
def test_a_step_adds_the_weighted_loss(auxiliary: str) -> None:
    """The gradient is that of method and auxiliary together; all heads learn, and nothing else does."""
    options: dict[str, Any] = {"auxiliary": auxiliary, "method": fitting(auxiliary), "consistency": "none"}
    steps = [noise_step(noise_config(auxiliary_weight=weight, **options)) for weight in (0.0, 1.0, 3.0)]
    gradients = []
    for step in steps:
        batch, _ = next(noise(step.config, 1))
        metrics = step(batch, None, 0)
        added = step.config.auxiliary_weight * metrics.get("auxiliary_loss", torch.zeros(()))
        torch.testing.assert_close(metrics["loss"], metrics["contrastive_loss"] + added)
        gradients.append(torch.cat([p.grad.flatten() for p in step.parameters if p.grad is not None]))
        assert all(p.grad is not None for p in step.parameters)
    torch.testing.assert_close(gradients[2] - gradients[0], 3 * (gradients[1] - gradients[0]), rtol=1e-3, atol=1e-4)
    adds = "auxiliary_weight" in spec(auxiliary, AUXILIARIES).options
    assert ((gradients[1] - gradients[0]).norm() > 1e-3) == adds


@pytest.mark.parametrize("auxiliary", ["multiview", "clsa"])
def test_one_length_at_a_time_is_the_same_step(auxiliary: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gradients = []
    for by_length in (True, False):
        monkeypatch.setattr(method_class(auxiliary, AUXILIARIES), "by_length", by_length)
        step = noise_step(noise_config(auxiliary=auxiliary, method="moco"))
        batch, labelled = next(noise(step.config, 1))
        metrics = step(batch, labelled, 0)
        gradients.append([metrics["auxiliary_loss"], *(p.grad for p in step.parameters)])
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-6)


@EACH
def test_auxiliaries_join_cocor(auxiliary: str) -> None:
    step = noise_step(noise_config(auxiliary=auxiliary, method=fitting(auxiliary), auxiliary_pairs="composites"))
    for number, (batch, labelled) in enumerate(noise(step.config, 2)):
        metrics = step(batch, labelled if step.outer else None, number)
    assert all(value.isfinite() for value in metrics.values()) and "consistency_loss" in metrics


@pytest.mark.parametrize("auxiliary", ["clsa", "looc"])  # compiling takes long; these two have passes of their own
def test_compiled_backbones_make_the_same_step(auxiliary: str) -> None:
    config = noise_config(auxiliary=auxiliary, method=fitting(auxiliary), consistency="none")
    written, compiled = noise_step(config), noise_step(config)
    compile_backbones(compiled, backend="aot_eager")
    for number, (batch, _) in enumerate(noise(config, 2)):
        one, other = written(batch, None, number), compiled(batch, None, number)
    torch.testing.assert_close(other["loss"], one["loss"], rtol=1e-4, atol=1e-5)


@EACH
def test_steps_in_bfloat16(auxiliary: str) -> None:
    step = noise_step(
        noise_config(auxiliary=auxiliary, method=fitting(auxiliary), consistency="none"), precision=torch.bfloat16
    )
    for number, (batch, _) in enumerate(noise(step.config, 2)):
        loss = step(batch, None, number)["loss"]
    assert loss.isfinite() and loss.dtype == torch.float32


@EACH
def test_steps_resume(auxiliary: str) -> None:
    config = noise_config(auxiliary=auxiliary, method=fitting(auxiliary), consistency="none")
    through, first, second = (noise_step(config) for _ in range(3))
    for number, (batch, _) in enumerate(noise(config, 3)):
        through(batch, None, number)
        if number == 2:
            second.load_state_dict(copy.deepcopy(first.state_dict()))
        (second if number == 2 else first)(batch, None, number)
    runs.assert_same_bits(through.state_dict(), second.state_dict())


def test_smaller_composites_cost_less() -> None:
    config = noise_config(auxiliary="clsa", method="moco", image_size=64, composite_size=32, lengths=(1, 2))
    assert method_class("clsa", AUXILIARIES).cost(config) == profile.costs(config, 1)["composites"] == 3 * 2 / 4


@pytest.mark.parametrize("auxiliary", ["equimod", "looc"])  # of views that no other run has
def test_a_run_profiles_and_resumes(
    auxiliary: str, photo_folder: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profile, "STEPS", 2)
    options = {"data": photo_folder, "auxiliary": auxiliary, "method": fitting(auxiliary), "consistency": "none"}
    options["lr"] = 1e-3  # VICReg's own is for runs with a warm-up
    assert main(runs.flags(output=tmp_path / "profiled", profile=True, **options)) == 0
    text = capsys.readouterr().out
    cost = method_class(auxiliary, AUXILIARIES).cost(load(runs.flags(**options)))
    assert (f"{cost:7.2f}" in text.split("auxiliary")[-1].splitlines()[0]) == (cost > 0)
    runs.assert_resumes(tmp_path, 4, **options, **runs.EVERY_STEP)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--auxiliary multiview --method intl", "multiview goes with --method moco|simsiam|supcon|byol|simclr"),
        ("--auxiliary strongview --composite-size 112", "composite_size: strongview contrasts composites with views"),
        ("--auxiliary clsa --method simsiam", "clsa goes with --method moco; simsiam has no queue of keys"),
        ("--auxiliary equimod", "--consistency none or --auxiliary-pairs composites"),
        (
            "--auxiliary augself --auxiliary-pairs composites --recipe released",
            "needs original and composites of one crop",
        ),
        ("--auxiliary multiview --hypergradient taylor", "taylor compares losses that --auxiliary multiview"),
        ("--auxiliary multiveiw", "did you mean multiview"),
    ],
)
def test_what_does_not_go_together_is_refused(flags: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        load(flags.split())
    assert message in str(caught.value)
