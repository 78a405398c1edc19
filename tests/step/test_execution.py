"""Test that compiled and recorded steps are the written one."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.method_programs import in_dtype
from helpers.steps import GPU, noise, noise_config, noise_step
from helpers.steps import WORLD as CPU
from torch import Tensor, nn

from cocor.config.options import Config
from cocor.distributed.collectives import World
from cocor.monitor.health import SkipNonFinite
from cocor.step.compile import LONG_RUN, choose, compile_backbones, executable
from cocor.step.cudagraph import WARM_UP, GraphedStep
from cocor.step.optim import Cosine
from cocor.step.step import TrainingStep
from loaders.errors import UserError


@pytest.fixture(autouse=True)
def _exact_float32(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Without TF32, whose rounding would hide mistakes, and without algorithms that are chosen by their speed."""
    saved = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    yield
    torch.set_float32_matmul_precision(saved)


def train(config: Config, world: World, execution: str, steps: int) -> tuple[TrainingStep, list[dict[str, float]]]:
    step = noise_step(config, world)
    execute = executable(step, execution)
    rows = []
    for number, pair in enumerate(noise(config, steps, world.device)):
        rows.append({name: float(value) for name, value in execute(*pair, number).items()})
    return step, rows


def assert_same(found: list[dict[str, float]], expected: list[dict[str, float]], tolerance: float) -> None:
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert one.keys() == other.keys()
        for name, value in other.items():
            assert one[name] == pytest.approx(value, rel=tolerance, abs=tolerance), (number, name)


def state_of(step: TrainingStep) -> list[Tensor]:
    """All that a step changes: weights, buffers and moments, in an order that is the same for two steps alike."""
    parts = step.parts().values()
    modules = [tensor for part in parts if isinstance(part, nn.Module) for tensor in part.state_dict().values()]
    optimisers = [part for part in parts if isinstance(part, torch.optim.Optimizer)]
    states = [part.state[p] for part in optimisers for group in part.param_groups for p in group["params"]]
    names = ("momentum_buffer", "exp_avg", "exp_avg_sq")
    return modules + [state[name] for state in states for name in names if state.get(name) is not None]


def assert_follows(config: Config, world: World, execution: str, steps: int) -> None:
    """Each of ``steps`` steps, from the state in which the written code is, in float64: left to themselves two runs on
    noise drift apart from the last bit on, and in float32 a single ReLU that turns by rounding moves a step's gradients
    by percents."""
    step, written = (in_float64(noise_step(config, world)) for _ in range(2))
    execute = executable(step, execution)
    for number, pair in enumerate(noise(config, steps, world.device)):
        batch, labelled = (in_dtype(one, torch.float64) for one in pair)
        if number:
            for own, other in zip(state_of(step), state_of(written), strict=True):
                own.copy_(other)
        before = [tensor.clone() for tensor in state_of(written)]
        row, expected = (
            {name: float(value) for name, value in run(batch, labelled, number).items()} for run in (execute, written)
        )
        assert_same([row], [expected], 1e-5)
        if number == 0:
            continue  # moments are made in the first step
        for own, other, old in zip(state_of(step), state_of(written), before, strict=True):
            own, other, old = own.double(), other.double(), old.double()
            assert (own - other).norm() <= 1e-4 * (other - old).norm() + 1e-7 * old.norm() + 1e-10, number


def in_float64(step: TrainingStep) -> TrainingStep:
    for part in step.parts().values():
        if isinstance(part, nn.Module):
            part.double()
    return step


class TestChoice:
    @pytest.mark.parametrize(
        ("options", "steps", "chosen"),
        [
            ({}, LONG_RUN, "fused"), ({}, LONG_RUN - 1, "graph"), ({"consistency": "abs"}, LONG_RUN, "graph"),
            ({"optimiser": "lars"}, LONG_RUN, "compiled"), ({"optimiser": "lars"}, 10, "eager"),
            ({"optimiser": "adamw"}, 10, "graph"),
            ({"execution": "compiled"}, 10, "compiled"),
        ],
    )  # fmt: skip
    def test_a_gpu(self, options: dict, steps: int, chosen: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("cocor.step.compile.missing_to_compile", lambda device: None)
        assert choose(noise_config(**options), GPU, steps) == chosen

    @pytest.mark.parametrize("world", [CPU, GPU], ids=["cpu", "gpu"])
    def test_without_a_compiler(self, world: World, tmp_path: Path, monkeypatch: Any, caplog: Any) -> None:
        monkeypatch.setenv("PATH", str(tmp_path))
        for variable in ("CC", "CXX"):
            monkeypatch.delenv(variable, raising=False)
        with pytest.raises(UserError, match=r"--execution compiled: .* and there is no g"):
            choose(noise_config(execution="compiled"), world, 1)
        assert choose(noise_config(), world, LONG_RUN) == ("graph" if world is GPU else "eager")
        assert ("not compiled" in caplog.text) == (world is GPU)

    def test_the_cpu(self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
        assert choose(noise_config(), CPU, 10**6) == "eager"
        monkeypatch.setattr("cocor.step.compile.missing_to_compile", lambda device: None)
        assert choose(noise_config(execution="compiled"), CPU, 1) == "compiled"
        assert "on a CPU compiling takes minutes" in caplog.text
        with pytest.raises(UserError, match="--execution graph: CUDA graphs need a GPU"):
            choose(noise_config(execution="graph"), CPU, 1)
        for options in ({"consistency": "abs", "execution": "fused"}, {"optimiser": "lars", "execution": "graph"}):
            with pytest.raises(UserError, match="--execution"):
                noise_config(**options)


def test_compiling_keeps_names_in_checkpoints() -> None:
    step, written = noise_step(noise_config(), CPU), noise_step(noise_config(), CPU)
    executable(step, "compiled")  # nothing is compiled before the first step
    assert list(step.state_dict()["method"]) == list(written.state_dict()["method"])


@pytest.mark.parametrize("method", ["moco", "simsiam"])
def test_what_the_compiler_is_given_is_the_step(method: str) -> None:
    """All passes as traced (running statistics or not, gradients or not, keys in groups), executed without fusing."""
    config = noise_config(method=method)
    _, expected = train(config, CPU, "eager", steps=2)
    step = noise_step(config, CPU)
    compile_backbones(step, backend="aot_eager")
    for number, pair in enumerate(noise(config, 2, CPU.device)):
        row = {name: float(value) for name, value in step(*pair, number).items()}
        assert_same([row], expected[number : number + 1], 1e-3)


def test_the_comparison_itself() -> None:
    assert_follows(noise_config(), CPU, "eager", steps=3)


KINDS = [
    {"hypergradient": "taylor"}, {"consistency": "abs"}, {"consistency": "none"}, {"mmnn": "constants"},
    {"method": "byol", "optimiser": "sgd", "sync_bn": False}, {"method": "supcon"},
    {"optimiser": "adamw", "lr": 1e-3, "clip_grad": 1.0}, {"accumulate": 2},
    *({"method": name, "optimiser": "sgd"} for name in ("simclr", "barlow", "vicreg")),
]  # fmt: skip
TURNS = [
    {"lengths_per_step": 1}, {"composite_size": 24}, {"mmnn_every": 3},
    {"lengths_per_step": 2, "composite_size": 24, "mmnn_every": 2}, {"mmnn_every": 2, "hypergradient": "taylor"},
]  # fmt: skip


@pytest.mark.gpu
class TestOnGpu:
    @pytest.mark.parametrize(("execution", "steps", "options"), [
        *((how, 20, {"method": name}) for how in ("compiled", "graph", "fused") for name in ("moco", "simsiam")),
        *(("graph", WARM_UP + 3, options) for options in KINDS), 
        *((how, 20, options) for how in ("graph", "fused") for options in TURNS),
    ], ids=str)  # fmt: skip
    def test_each_step_is_the_written_one(self, execution: str, steps: int, options: dict) -> None:
        """Steps in which the MMNN learns and steps in which it does not are each recorded within 20."""
        assert_follows(noise_config(**options), GPU, execution, steps)

    def test_lengths_side_by_side(self) -> None:
        config = noise_config()
        results = []
        for parallel in (False, True):
            step = noise_step(config, GPU)
            execute = GraphedStep(step, parallel)
            for number, pair in enumerate(noise(config, WARM_UP + 5, GPU.device)):
                metrics = execute(*pair, number)
            results.append([{name: float(value) for name, value in metrics.items()}])
        assert_same(results[1], results[0], 2e-3)

    def test_learning_rates_reach_the_recording(self) -> None:
        step = noise_step(noise_config(), GPU)
        execute = executable(step, "graph")
        pairs = list(noise(step.config, WARM_UP + 2, GPU.device))
        for number, pair in enumerate(pairs):
            execute(*pair, number)
        assert step.outer is not None
        learning = [*step.parameters, *step.outer.mmnn.parameters(), *step.outer.classifier.parameters()]
        before = [weight.detach().clone() for weight in learning]
        execute(*pairs[0], len(pairs))
        assert not any(torch.equal(new, old) for new, old in zip(learning[:3], before[:3], strict=True))
        before = [weight.detach().clone() for weight in learning]
        step.schedule = step.outer.mmnn_schedule = step.outer.classifier_schedule = Cosine(1, wait=1)
        execute(*pairs[0], len(pairs))
        assert all(torch.equal(new, old) for new, old in zip(learning, before, strict=True))

    def test_another_size_is_run_and_nan_undone(self) -> None:
        step = noise_step(noise_config(), GPU)
        execute = SkipNonFinite(step, executable(step, "graph"))
        pairs = list(noise(step.config, WARM_UP + 3, GPU.device))
        for number, pair in enumerate(pairs[:-1]):
            execute(*pair, number)
        before = [weight.clone() for weight in step.weights()]
        batch, labelled = pairs[-1]
        batch.views.fill_(float("nan"))
        assert execute(batch, labelled, len(pairs))["skipped"] == 1
        assert all(torch.equal(new, old) for new, old in zip(step.weights(), before, strict=True))
        batch, labelled = next(noise(noise_config(batch_size=8), 1, GPU.device))
        assert execute(batch, labelled, len(pairs) + 1)["loss"].isfinite()

    def test_a_recording_resumes(self, tmp_path: Path) -> None:
        config = noise_config()
        whole = noise_step(config, GPU)
        execute = executable(whole, "graph")
        pairs = list(noise(config, 12, GPU.device))
        for number, pair in enumerate(pairs):
            if number == 6:
                torch.save(whole.state_dict(), tmp_path / "state.pt")
            execute(*pair, number)
        resumed = noise_step(config, GPU)
        resumed.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
        execute = executable(resumed, "graph")
        for number, pair in enumerate(pairs[6:], start=6):
            execute(*pair, number)
        for one, other in zip(resumed.weights(), whole.weights(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)

    def test_evaluation_compiles_nothing(self) -> None:
        step = noise_step(noise_config(), GPU)
        execute = executable(step, "compiled")
        for number, pair in enumerate(noise(step.config, 1, GPU.device)):
            execute(*pair, number)
        count = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        with torch.compiler.set_stance("force_eager"), torch.no_grad():
            step.method.backbone(torch.zeros(3, 3, 32, 32, device="cuda"))
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == count
