"""Test options that make steps cheaper against what each means, written down literally."""

from collections import Counter
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers.runs import EVERY_STEP, STEPS, Capture, assert_resumes, flags, metrics
from helpers.steps import EPOCH, WORLD, Literal, assert_equal_steps, assert_the_mmnn_has_moved, build, config_for
from torch import Tensor

from cocor.config.resolve import load, resolve
from cocor.run import build as build_run
from cocor.step.subsample import StepSchedule, scaled_down
from cocor.train import main
from loaders.batch import Batch

ALL = {"lengths_per_step": 2, "composite_size": 16, "mmnn_every": 2}
EACH = [{"lengths_per_step": 1}, {"lengths_per_step": 2}, {"composite_size": 16}, {"mmnn_every": 2}, ALL]


def triangle(size: int, small: int) -> Tensor:
    """(small, size): by which weights a pixel is made of the larger image's, the antialiased bilinear filter."""
    scale = size / small
    centres = (torch.arange(small, dtype=torch.float64) + 0.5) * scale
    distance = (torch.arange(size, dtype=torch.float64) + 0.5 - centres[:, None]).abs() / scale
    weights = (1 - distance).clamp_min(0)
    return weights / weights.sum(1, keepdim=True)


class Cheaper(Literal):
    """The same algorithm with turns: lengths one after the other round and round, labels now and then."""

    def __call__(self, batch: Batch, labelled: Batch | None, number: int) -> dict[str, Tensor]:
        config, count = self.config, len(self.config.lengths)
        taken = config.lengths_per_step or count
        with_labels = [n % config.mmnn_every == 0 for n in range(number + 1)]
        before = with_labels[:-1].count(with_labels[-1])  # such steps as this one
        turn = [(before * taken + at) % count for at in range(taken)]
        composites = batch.composites[turn]
        if config.composite_size:
            weights = triangle(config.image_size, config.composite_size)
            composites = torch.einsum("yh,lbchw,xw->lbcyx", weights, composites, weights)
        batch = replace(batch, composites=composites, composition=batch.composition[turn])
        classifier = self.classifier
        if number % config.mmnn_every:
            self.classifier = None
        known = super().__call__(batch, labelled, number)
        self.classifier = classifier
        return known


MIXED = [{"method": "simsiam", "consistency": "abs"}, {"hypergradient": "taylor"}, {"recipe": "released"}]


@pytest.mark.parametrize("options", [*EACH, *(ALL | more for more in MIXED)], ids=str)
def test_a_step_is_the_algorithm_on_its_part(photo_folder: Path, options: dict) -> None:
    config = config_for(photo_folder, **options)
    step = assert_equal_steps(config, EPOCH, Cheaper)
    assert_the_mmnn_has_moved(config, step)


def test_metrics_name_the_lengths_of_the_step(photo_folder: Path) -> None:
    step, pairs = build(config_for(photo_folder, **ALL), EPOCH)
    told = [step(*pair, number).keys() for number, pair in enumerate(pairs)]
    lengths = [[n for n in (1, 2, 3) if f"similarity_{n}" in names and f"target_{n}" in names] for names in told]
    assert lengths == [[1, 2], [1, 2], [1, 3]]
    assert [{"labelled_loss", "labelled_accuracy", "hypergradient_norm"} <= names for names in told] == [1, 0, 1]
    assert "labelled_loss" not in told[1]
    step, pairs = build(config_for(photo_folder))  # without options nothing is copied
    for number, (batch, labelled) in enumerate(pairs):
        assert step.share(batch, labelled, number) == (batch, labelled)
    step, pairs = build(config_for(photo_folder, composite_size=32, lengths_per_step=3))
    assert step.share(*pairs[0], 0)[0] is pairs[0][0]


@pytest.mark.parametrize("every", [1, 2, 3, 4])
@pytest.mark.parametrize(("count", "taken"), [(3, 1), (3, 2), (4, 3), (5, 2), (3, 0)])
def test_lengths_have_equally_many_turns(count: int, taken: int, every: int) -> None:
    """Or one more, among the steps in which the MMNN learns and among the others."""
    options = {"lengths": tuple(range(1, count + 1)), "lengths_per_step": taken, "mmnn_every": every}
    schedule = StepSchedule(resolve(options), steps_per_epoch=9)
    counts = {labelled: [0] * count for labelled in (True, False)}
    for step in range(60):
        places = schedule.places(step)
        assert len(set(places)) == (taken or count) and places == sorted(places)
        for place in places:
            counts[schedule.has_labelled(step)][place] += 1
        assert all(max(row) - min(row) <= 1 for row in counts.values())
    schedule = StepSchedule(resolve(options), steps_per_epoch=1000)
    for first in (0, 5):  # a cycle holds whole turns
        steps = range(first, first + schedule.cycle)
        turns = Counter(place for step in steps for place in schedule.places(step))
        assert len(turns) == count and len({*turns.values()}) == 1


@pytest.mark.parametrize("consistency", ["softplus", "abs"])
def test_mean_gradient_over_a_turn(photo_folder: Path, consistency: str) -> None:
    options = {"method": "simsiam", "consistency": consistency, "lr": 0.0, "mmnn_lr": 0.0}

    def gradients(per_step: int) -> list[Tensor]:
        """Mean over three steps on one batch by weights that stay as they are."""
        step, pairs = build(config_for(photo_folder, lengths_per_step=per_step, **options))
        rows = []
        for number in range(3):
            step(*pairs[0], number)
            rows.append([p.grad.clone() for p in step.parameters if p.grad is not None])
        return [torch.stack(column).mean(0) for column in zip(*rows, strict=True)]

    whole, one, two = gradients(0), gradients(1), gradients(2)
    torch.testing.assert_close(one, whole, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(two, whole, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_composites_are_scaled_down_as_crops_are(dtype: torch.dtype) -> None:
    large = torch.randn(2, 3, 31, 31, 3, dtype=torch.float64).to(dtype).movedim(-1, 2)
    small, weights = scaled_down(large, 12), triangle(31, 12)
    expected = torch.einsum("yh,lbchw,xw->lbcyx", weights, large.double(), weights)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2}[dtype]
    torch.testing.assert_close(small.double(), expected, rtol=tolerance, atol=tolerance)
    assert small.dtype == dtype and all(images.is_contiguous(memory_format=torch.channels_last) for images in small)


def test_labelled_batches_in_their_turn(tmp_path: Path) -> None:
    """Of 3 steps an epoch the first and the third have labels; no labelled batch is lost or repeated."""
    common = {"output": tmp_path, "loader": "synthetic", "synthetic_images": 8 * STEPS}
    with closing(build_run(load(flags(**common)), WORLD)) as run:
        usual = [labelled.index.tolist() for epoch in (0, 1) for _, labelled in run.pairs(epoch, 0) if labelled]
    with closing(build_run(load(flags(**common, mmnn_every=2)), WORLD)) as run:
        whole = [[labelled and labelled.index.tolist() for _, labelled in run.pairs(epoch, 0)] for epoch in (0, 1)]
        for epoch in (0, 1):
            for first in range(1, STEPS):
                rest = [labelled and labelled.index.tolist() for _, labelled in run.pairs(epoch, first)]
                assert rest == whole[epoch][first:]
    assert whole == [[usual[0], None, usual[1]], [usual[2], None, usual[3]]]


TAYLOR = {"mmnn_every": 2, "hypergradient": "taylor", "on_nan": "skip"}


@pytest.mark.parametrize("options", [*EACH[1:], TAYLOR], ids=str)
def test_a_run_resumes_within_a_turn(photo_folder: Path, tmp_path: Path, options: dict) -> None:
    common = {"data": photo_folder, "loader": "torch", **EVERY_STEP, **options}
    assert_resumes(tmp_path, STEPS + 1, **common)
    timed = ("time_s", "time_left_s", "images_per_s", "data_wait_share")
    one, other = ([{k: v for k, v in line.items() if k not in timed} for line in metrics(tmp_path / f, "train")]
                  for f in ("run", "whole"))  # fmt: skip
    assert one == other


@pytest.mark.parametrize(("mmnn", "steps"), [("learned", 4), ("constants", 2)])
def test_dry_run_of_turns(photo_folder: Path, tmp_path: Path, capsys: Capture, mmnn: str, steps: int) -> None:
    usual = {"data": photo_folder, "output": tmp_path / "run", "loader": "torch"}
    turns = {key: value for key, value in ALL.items() if mmnn == "learned" or key != "mmnn_every"}
    assert main([*flags(**usual, **turns, batch_size=4, mmnn=mmnn), "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert f"loss after {steps} steps" in shown and "s a step, 12 steps" in shown
    assert "composites: (2, 4, 3, 16, 16)" in shown  # what a step trains on
    assert main(flags(**usual, backbone="test_vit", composite_size=24)) == 2
    assert "error: --composite-size 24: test_vit cannot take it" in capsys.readouterr().err.splitlines()[-1]
    assert main(flags(**usual, epochs=1)) == 0
    assert main([*flags(**usual, epochs=1, mmnn_every=2), "--resume"]) == 2
    assert "mmnn_every: 1 in the checkpoint, 2 now" in capsys.readouterr().err.splitlines()[-1]
