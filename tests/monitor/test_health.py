"""A run that goes wrong says so: losses that are no numbers, collapsed features, an MMNN without gradient."""

import json
import logging
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers.runs import assert_same_bits, final_state, flags
from helpers.steps import WORLD, build, config_for

from cocor import checkpoint
from cocor.config.options import Config
from cocor.monitor.health import EVERY, MOST_SKIPPED, HealthMonitor, SkipNonFinite
from cocor.train import main
from loaders.batch import Batch
from loaders.errors import UserError

Caplog = pytest.LogCaptureFixture

NAMES = [f"class/{number}.jpg" for number in range(8)]
HEALTHY = {"loss": 2.0, "contrastive_loss": 2.0, "contrastive_feature_std": 0.5, "hypergradient_norm": 1e-4}


def batch_of(index: list[int]) -> Batch:
    empty = torch.empty(0)
    return Batch(empty, empty, empty, empty, torch.zeros(len(index)), torch.tensor(index))


class Watched:
    """A watch that is shown steps with the metrics of :data:`HEALTHY`, unless said otherwise."""

    def __init__(self, folder: Path, **options: object) -> None:
        self.step = 0
        self.watch = HealthMonitor(Config(output=folder, queue_size=100, **options), WORLD, NAMES)  # type: ignore[arg-type]

    def show(self, steps: int, labelled: bool = True, **values: float) -> None:
        healthy = {k: v for k, v in HEALTHY.items() if labelled or k != "hypergradient_norm"}
        for _ in range(steps):
            self.step += 1
            metrics = {name: torch.tensor(value) for name, value in (healthy | values).items()}
            self.watch(self.step, metrics, batch_of([self.step % 8, 0]), batch_of([7]) if labelled else None, 0.03)


class TestLossesThatAreNoNumbers:
    @pytest.mark.parametrize("loss", [math.nan, math.inf])
    def test_the_step_is_recorded_with_its_samples(self, tmp_path: Path, loss: float) -> None:
        watched = Watched(tmp_path)
        watched.show(EVERY + 3)
        with pytest.raises(UserError, match=f"not finite at step {EVERY + 4}: lower --lr.*{tmp_path}/faults.jsonl"):
            watched.show(1, contrastive_loss=loss)
            watched.show(EVERY)
        (record,) = map(json.loads, (tmp_path / "faults.jsonl").read_text().splitlines())
        assert (record["kind"], record["step"]) == ("loss not finite", EVERY + 4)
        assert record["losses"][0]["contrastive_loss"] == str(loss)
        first = (EVERY + 4) % 8
        assert record["samples"] == [first, 0] and record["names"] == [NAMES[first], NAMES[0]]
        assert record["labelled_samples"] == [7]

    def test_too_many_skipped_steps_end_the_run(self, tmp_path: Path, caplog: Caplog) -> None:
        watched = Watched(tmp_path, on_nan="skip")
        with caplog.at_level(logging.WARNING):
            watched.show(2, loss=math.nan, skipped=1.0)
            watched.show(EVERY - 2, skipped=0.0)
        assert "not finite at step 2: its update is left out" in caplog.text and len(caplog.records) == 2
        with pytest.raises(UserError, match=f"nor in the {MOST_SKIPPED - 1} before"):
            watched.show(2 * MOST_SKIPPED, loss=math.nan, skipped=1.0)

    def test_steps_without_a_labelled_batch(self, tmp_path: Path) -> None:
        """They lack the labelled loss, and the step before or behind has its own."""
        watched = Watched(tmp_path, on_nan="skip")
        watched.show(3, labelled=False)
        watched.show(1, labelled_loss=math.inf)
        watched.show(1, labelled=False, loss=math.nan)
        watched.show(1, labelled_loss=1.0)
        watched.watch.check(0.03)
        one, other = map(json.loads, (tmp_path / "faults.jsonl").read_text().splitlines())
        assert (one["step"], one["labelled_samples"], one["losses"][0]["labelled_loss"]) == (4, [7], "inf")
        assert (other["step"], other["labelled_samples"], other["losses"][0]["loss"]) == (5, [], "nan")
        assert "labelled_loss" not in other["losses"][0]

    def test_a_skipped_step_leaves_no_trace(self, photo_folder: Path) -> None:
        """The step after it is the one that would have been made in its place."""
        config = config_for(photo_folder, on_nan="skip")
        for optimiser_is_new in (True, False):
            step, ((batch, labelled), (other, _)) = build(config)
            hostile = replace(batch, views=batch.views.clone().index_fill_(1, torch.tensor([3]), math.nan))
            skipping = SkipNonFinite(step, step)
            if not optimiser_is_new:
                assert skipping(other, labelled, 0)["skipped"] == 0
            before = checkpoint.portable(step.state_dict())
            assert skipping(hostile, labelled, 1)["skipped"] == 1
            after = checkpoint.portable(step.state_dict())
            for part in ("method", "mmnn", "classifier"):
                assert_same_bits(after[part], before[part])
            expected, _ = build(config)
            if not optimiser_is_new:
                expected(other, labelled, 0)
            for maker in (skipping, expected):
                maker(batch, labelled, 1)  # type: ignore[operator]
            assert_same_bits(checkpoint.portable(step.state_dict()), checkpoint.portable(expected.state_dict()))

    def test_a_run_that_skips_keeps_finite_weights(self, photo_folder: Path, tmp_path: Path) -> None:
        options = {"data": photo_folder, "loader": "torch", "consistency": "none", "method": "simsiam", "lr": 1e30}
        assert main(flags(**options, output=tmp_path / "run", on_nan="skip")) == 0
        assert all(value.isfinite().all() for value in final_state(tmp_path / "run")["method"].values())
        steps = [json.loads(line)["step"] for line in (tmp_path / "run" / "faults.jsonl").read_text().splitlines()]
        assert steps and steps == list(range(steps[0], 7))


class TestCollapse:
    def test_healthy_runs_are_not_warned_of(self, tmp_path: Path, caplog: Caplog) -> None:
        watched = Watched(tmp_path)
        watched.show(3 * EVERY)
        watched.show(EVERY // 2, contrastive_feature_std=0.001)  # a moment
        watched.show(EVERY)
        assert not caplog.records

    @pytest.mark.parametrize(("values", "words"), [
        ({"contrastive_feature_std": 0.003}, "features have collapsed: standard deviation 0.003 of 1"),
        ({"contrastive_loss": math.log(101) - 0.01}, "loss is that of guessing, ln(K + 1) = 4.615"),
        ({"hypergradient_norm": 1e-12}, "the MMNN does not learn: no gradient of more than 1e-12"),
    ])  # fmt: skip
    def test_it_is_warned_of_once_within_100_steps(
        self, tmp_path: Path, caplog: Caplog, values: dict[str, float], words: str
    ) -> None:
        watched = Watched(tmp_path)
        watched.show(EVERY // 3)
        watched.show(100, **values)
        assert words in caplog.text
        watched.show(5 * EVERY, **values)
        assert len(caplog.records) == 1

    def test_sparse_mmnn_steps_are_judged_alone(self, tmp_path: Path, caplog: Caplog) -> None:
        watched = Watched(tmp_path)
        for norm in [1e-4] * 20 + [1e-12] * 20:
            assert not caplog.records or norm < 1e-4
            watched.show(1, hypergradient_norm=norm)
            watched.show(4, labelled=False)
        assert "the MMNN does not learn" in caplog.text

    @pytest.mark.parametrize(
        ("moved", "similarity", "warned"),
        [(1e-3, 0.9, True), (-1e-3, 0.5, True), (0.01, 0.9, False), (1e-3, 0.81, False)],
    )
    def test_still_targets_are_warned_of(
        self, tmp_path: Path, caplog: Caplog, moved: float, similarity: float, warned: bool
    ) -> None:
        """After a tenth of the run. A step is an epoch here: 5 of 505 without learning, a tenth of the others."""
        options: dict[str, object] = {"epochs": 505, "lengths": (1,), "mmnn_optimiser": "sgd"}
        watched = Watched(tmp_path, **options)
        shown = {"target_moved_1": moved, "target_1": 0.8, "similarity_1": similarity}
        watched.show(EVERY, **shown)
        assert not caplog.text
        watched.show(2 * EVERY, **shown)
        assert ("hardly moves its targets: after 100 steps" in caplog.text) == warned
        assert caplog.text.count("use --mmnn-optimiser adam") == warned

    def test_a_falling_knn_accuracy_is_warned_of_once(self, tmp_path: Path, caplog: Caplog) -> None:
        """As plain SimSiam's on CIFAR-10 at a learning rate of 0.25, whose losses and spread look healthy."""
        watch = Watched(tmp_path).watch
        for epoch, accuracy in enumerate([0.299, 0.507, 0.463, 0.421, 0.347, 0.333]):
            watch.check_knn(accuracy, 5000, 10 * epoch)
        assert caplog.messages == [
            "k-NN accuracy has fallen from 50.7% after 10 epochs to 34.7% after 40: the features get worse; "
            "try a lower --lr"
        ]
        watch = Watched(tmp_path).watch
        for accuracy in (0.5, 0.25, 0.75, 0.5):  # of few images
            watch.check_knn(accuracy, 8, 1)
        assert len(caplog.records) == 1
