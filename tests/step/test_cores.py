"""Test that a step on a CPU uses its cores and computes the same in threads."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
import torch
from helpers.runs import environment
from helpers.steps import WORLD, noise, noise_config, noise_step

from cocor.step.compile import executable
from cocor.step.step import TrainingStep
from loaders.cpus import available_cores

CORES = available_cores()
LARGE = {"batch_size": 512, "queue_size": 512}


@pytest.fixture(autouse=True)
def all_cores() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(CORES)
    yield
    torch.set_num_threads(before)


def trained(step: TrainingStep, execute: Any) -> list[Any]:
    """The metrics of a few steps, and the weights and buffers after them."""
    rows = [execute(*pair, at) for at, pair in enumerate(noise(step.config, 3, WORLD.device))]
    return [float(value) for row in rows for value in row.values()] + list(step.method.state_dict().values())


@pytest.mark.skipif(CORES < 2, reason="needs 2 cores")
@pytest.mark.parametrize(
    "options", [{"method": "moco"}, {"method": "simsiam", "accumulate": 2}, {"consistency": "abs"}], ids=str
)
def test_threads_compute_the_written_step(options: dict[str, Any]) -> None:
    config = noise_config(**options)
    step, written = noise_step(config, WORLD), noise_step(config, WORLD)
    execute = executable(step, "eager")
    with closing(step.streams):
        found, expected = trained(step, execute), trained(written, written)  # with as many threads an operation
    assert step.composites is not None and step.composites._method is not step.method
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(torch.as_tensor(one), torch.as_tensor(other))


@pytest.mark.parametrize("passive", [True, False])
@pytest.mark.parametrize(("options", "parts", "most"), [
    ({}, 4, 1), (LARGE, 4, 8), (LARGE | {"lengths_per_step": 1}, 2, 8),
    ({"consistency": "none"}, 1, 1), ({"image_size": 512}, 1, 64),
], ids=str)  # fmt: skip
def test_all_cores_are_used(options: dict[str, Any], parts: int, most: int, passive: bool,
                            monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    """A large batch would need its memory several times, and a small one has no use for many threads."""
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE" if passive else "ACTIVE")
    step, threads = noise_step(noise_config(**options), WORLD), min(CORES, parts)
    with closing(step.streams):
        executable(step, "eager")
        assert torch.get_num_threads() == max(1, min(CORES // threads - (not passive), most))
    assert (step.streams._threads is not None) == (threads > 1)
    assert torch.get_num_threads() == CORES  # for what comes next in this process


def test_dropout_draws_its_numbers_in_turn() -> None:
    step = noise_step(noise_config(), WORLD)
    step.method.backbone.add_module("dropout", torch.nn.Dropout(0.1))
    executable(step, "eager")
    assert step.streams._threads is None


def test_autocast_has_one_thread() -> None:
    """Its cache of weights is one for all threads."""
    step = noise_step(noise_config(), precision=torch.bfloat16)
    executable(step, "eager")
    assert step.streams._threads is None


@pytest.mark.parametrize(("given", "kept"), [(None, "PASSIVE"), ("ACTIVE", "ACTIVE")])
def test_commands_let_waiting_threads_sleep(given: str | None, kept: str) -> None:
    """OpenMP reads it when PyTorch loads. What the user has set is kept, and an import sets nothing."""
    place = {name: value for name, value in environment().items() if name != "OMP_WAIT_POLICY"}
    show = "print(os.environ.get('OMP_WAIT_POLICY'), 'torch' in sys.modules)"
    program = f"import os, sys; from cocor import cli; {show}; sys.argv[1:] = ['no-such-run']; cli.plot(); {show}"
    done = subprocess.run(
        [sys.executable, "-c", program], env=place | ({"OMP_WAIT_POLICY": given} if given else {}), text=True,
        capture_output=True, check=True,
    )  # fmt: skip
    assert done.stdout.split()[::2] == [str(given), kept] and done.stdout.split()[1] == "False"
