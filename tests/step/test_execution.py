"""Compiled and recorded steps make the same step as the one that is written down."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers.executions import CPU, GPU, batches, build, config_for
from torch import Tensor, nn

from cocor.config.options import Config
from cocor.distributed.collectives import World
from cocor.monitor.health import SkipNonFinite
from cocor.step.compile import LONG_RUN, choose, compile_backbones, executable, uncompiled
from cocor.step.cudagraph import WARM_UP, GraphedStep
from cocor.step.optim import Cosine
from cocor.step.step import TrainingStep
from loaders.batch import Batch
from loaders.errors import UserError


@pytest.fixture(autouse=True)
def _exact_float32() -> Iterator[None]:
    """Without TF32, whose rounding would hide mistakes, and without algorithms that are chosen by their speed."""
    saved = torch.backends.cudnn.allow_tf32, torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark
    torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark = False, False
    torch.set_float32_matmul_precision("highest")
    yield
    torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark = saved[0], saved[2]
    torch.set_float32_matmul_precision(saved[1])


def train(config: Config, world: World, execution: str, steps: int) -> tuple[TrainingStep, list[dict[str, float]]]:
    step = build(config, world)
    execute = executable(step, execution)
    rows = []
    for number, pair in enumerate(batches(config, world.device, steps)):
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
    return modules + [state["momentum_buffer"] for state in states if state.get("momentum_buffer") is not None]


def perturb(tensors: list[Tensor], size: float = 1e-6) -> None:
    """Change ``tensors`` by a few roundings."""
    for tensor in tensors:
        if tensor.is_floating_point():
            tensor.mul_(1 + size * torch.randn_like(tensor))


def assert_follows(config: Config, world: World, execution: str, steps: int) -> None:
    """Each of ``steps`` steps, from the state in which the written code is, in float64: left to themselves two runs on
    noise drift apart from the last bit on, and in float32 a single ReLU that turns by rounding moves a step's gradients
    by percents."""
    step, written = (in_float64(build(config, world)) for _ in range(2))
    execute = executable(step, execution)
    for number, pair in enumerate(batches(config, world.device, steps)):
        batch, labelled = map(in_double, pair)
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


def in_double(batch: Batch) -> Batch:
    return replace(batch, **{name: getattr(batch, name).double() for name in ("views", "original", "composites")})


class TestChoice:
    @pytest.mark.parametrize(
        ("options", "steps", "chosen"),
        [
            ({}, LONG_RUN, "fused"),
            ({}, LONG_RUN - 1, "graph"),
            ({"consistency": "abs"}, LONG_RUN, "graph"),
            ({"optimiser": "lars"}, LONG_RUN, "compiled"),
            ({"optimiser": "lars"}, 10, "eager"),
            ({"execution": "compiled"}, 10, "compiled"),
        ],
    )
    def test_a_gpu(self, options: dict, steps: int, chosen: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("cocor.step.compile.missing_to_compile", lambda device: None)
        assert choose(config_for(**options), GPU, steps) == chosen

    @pytest.mark.parametrize("world", [CPU, GPU], ids=["cpu", "gpu"])
    def test_without_a_compiler(
        self, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setenv("PATH", str(tmp_path))
        for variable in ("CC", "CXX"):
            monkeypatch.delenv(variable, raising=False)
        with pytest.raises(UserError, match=r"--execution compiled: .* and there is no g"):
            choose(config_for(execution="compiled"), world, 1)
        assert choose(config_for(), world, LONG_RUN) == ("graph" if world is GPU else "eager")
        assert ("not compiled" in caplog.text) == (world is GPU)

    def test_the_cpu(self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
        assert choose(config_for(), CPU, 10**6) == "eager"
        monkeypatch.setattr("cocor.step.compile.missing_to_compile", lambda device: None)
        assert choose(config_for(execution="compiled"), CPU, 1) == "compiled"
        assert "on a CPU compiling takes minutes" in caplog.text
        with pytest.raises(UserError, match="--execution graph: CUDA graphs need a GPU"):
            choose(config_for(execution="graph"), CPU, 1)

    @pytest.mark.parametrize(
        "options", [{"consistency": "abs", "execution": "fused"}, {"optimiser": "lars", "execution": "graph"}]
    )
    def test_options_that_exclude_each_other(self, options: dict) -> None:
        with pytest.raises(UserError, match="--execution"):
            config_for(**options)


def test_compiling_keeps_names_in_checkpoints() -> None:
    step, written = build(config_for(), CPU), build(config_for(), CPU)
    executable(step, "compiled")  # nothing is compiled before the first step
    assert list(step.state_dict()["method"]) == list(written.state_dict()["method"])


@pytest.mark.parametrize("method", ["moco", "simsiam"])
def test_what_the_compiler_is_given_is_the_step(method: str) -> None:
    """All passes as traced (running statistics or not, gradients or not, keys in groups), executed without fusing."""
    config = config_for(method=method)
    _, expected = train(config, CPU, "eager", steps=2)
    step = build(config, CPU)
    compile_backbones(step, backend="aot_eager")
    for number, pair in enumerate(batches(config, CPU.device, 2)):
        row = {name: float(value) for name, value in step(*pair, number).items()}
        assert_same([row], expected[number : number + 1], 1e-3)


def test_the_comparison_itself() -> None:
    assert_follows(config_for(), CPU, "eager", steps=3)


@pytest.mark.gpu
class TestOnGpu:
    @pytest.mark.parametrize("method", ["moco", "simsiam"])
    @pytest.mark.parametrize("execution", ["compiled", "graph", "fused"])
    def test_each_step_is_the_written_one(self, method: str, execution: str) -> None:
        assert_follows(config_for(method=method), GPU, execution, steps=20)

    @pytest.mark.parametrize("execution", ["compiled", "graph", "fused"])
    def test_twenty_steps_stay_near_the_written_ones(self, execution: str) -> None:
        config = config_for(lr=0.005)
        _, rows = train(config, GPU, execution, steps=20)
        _, expected = train(config, GPU, "eager", steps=20)
        disturbed = build(config, GPU)
        perturb(disturbed.weights())
        names = ["loss", "labelled_loss", "similarity_1", "similarity_2", "similarity_3"]
        noise = 0.0
        for number, pair in enumerate(batches(config, GPU.device, 20)):
            metrics = disturbed(*pair, number)
            noise = max(noise, *(abs(float(metrics[name]) - expected[number][name]) for name in names))
            apart = max(abs(rows[number][name] - expected[number][name]) for name in names)
            assert apart <= 20 * noise + 0.01, number

    @pytest.mark.parametrize(
        "options",
        [
            {"hypergradient": "taylor"}, {"consistency": "abs"}, {"consistency": "none"}, {"mmnn": "constants"},
            {"method": "byol", "optimiser": "sgd", "sync_bn": False}, {"method": "supcon"},
        ],
    )  # fmt: skip
    def test_every_kind_of_step_can_be_recorded(self, options: dict) -> None:
        assert_follows(config_for(**options), GPU, "graph", steps=WARM_UP + 3)

    @pytest.mark.parametrize(
        "options",
        [
            {"lengths_per_step": 1}, {"composite_size": 24}, {"mmnn_every": 3},
            {"lengths_per_step": 2, "composite_size": 24, "mmnn_every": 2},
            {"mmnn_every": 2, "hypergradient": "taylor"},
        ],
        ids=str,
    )  # fmt: skip
    @pytest.mark.parametrize("execution", ["graph", "fused"])
    def test_steps_with_turns_can_be_recorded(self, options: dict, execution: str) -> None:
        """Steps in which the MMNN learns and steps in which it does not are each recorded within these 20."""
        assert_follows(config_for(**options), GPU, execution, steps=20)

    def test_lengths_side_by_side(self) -> None:
        config = config_for()
        results = []
        for parallel in (False, True):
            step = build(config, GPU)
            execute = GraphedStep(step, parallel)
            for number, pair in enumerate(batches(config, GPU.device, WARM_UP + 5)):
                metrics = execute(*pair, number)
            results.append([{name: float(value) for name, value in metrics.items()}])
        assert_same(results[1], results[0], 2e-3)

    def test_learning_rates_reach_the_recording(self) -> None:
        step = build(config_for(), GPU)
        execute = executable(step, "graph")
        pairs = list(batches(step.config, GPU.device, WARM_UP + 2))
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

    def test_a_batch_of_another_size(self) -> None:
        step = build(config_for(), GPU)
        execute = executable(step, "graph")
        for number, pair in enumerate(batches(step.config, GPU.device, WARM_UP + 2)):
            execute(*pair, number)
        batch, labelled = next(batches(config_for(batch_size=8), GPU.device, 1))
        assert execute(batch, labelled, WARM_UP + 2)["loss"].isfinite()

    def test_recorded_steps_are_undone_at_nan(self) -> None:
        step = build(config_for(), GPU)
        execute = SkipNonFinite(step, executable(step, "graph"))
        pairs = list(batches(step.config, GPU.device, WARM_UP + 3))
        for number, pair in enumerate(pairs[:-1]):
            execute(*pair, number)
        before = [weight.clone() for weight in step.weights()]
        batch, labelled = pairs[-1]
        batch.views.fill_(float("nan"))
        metrics = execute(batch, labelled, len(pairs))
        assert metrics["skipped"] == 1
        assert all(torch.equal(new, old) for new, old in zip(step.weights(), before, strict=True))

    def test_a_recording_resumes(self, tmp_path: Path) -> None:
        config = config_for()
        whole = build(config, GPU)
        execute = executable(whole, "graph")
        pairs = list(batches(config, GPU.device, 12))
        for number, pair in enumerate(pairs):
            if number == 6:
                torch.save(whole.state_dict(), tmp_path / "state.pt")
            execute(*pair, number)
        resumed = build(config, GPU)
        resumed.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
        execute = executable(resumed, "graph")
        for number, pair in enumerate(pairs[6:], start=6):
            execute(*pair, number)
        for one, other in zip(resumed.weights(), whole.weights(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)

    def test_evaluation_compiles_nothing(self) -> None:
        step = build(config_for(), GPU)
        execute = executable(step, "compiled")
        for number, pair in enumerate(batches(step.config, GPU.device, 1)):
            execute(*pair, number)
        count = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        with uncompiled(), torch.no_grad():
            step.method.backbone(torch.zeros(3, 3, 32, 32, device="cuda"))
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == count
