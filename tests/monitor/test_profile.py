"""``--profile``: parts that add up, beside the cost model."""

import gzip
import json
from pathlib import Path

import pytest
import torch
from helpers.manual_clock import wound_by_hand
from helpers.runs import flags

import cocor.monitor.profile
from cocor.config.resolve import resolve
from cocor.monitor.profile import Parts, costs, table
from cocor.train import main

Capsys = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch


def test_an_inner_part_is_not_counted_twice(monkeypatch: Patch) -> None:
    clock, parts = wound_by_hand(cocor.monitor.profile, monkeypatch), Parts(torch.device("cpu"))
    parts.start()
    with parts("outer"):
        clock.sleep(2)
        with parts("inner"):
            clock.sleep(3)
        clock.sleep(1)
    clock.sleep(4)
    assert parts.read() == {"outer": 3, "inner": 3, "other": 4}


@pytest.mark.parametrize(("options", "expected"), [
    ({}, {"contrastive": 4, "original": 1, "composites": 9, "labelled": 0.75}),
    ({"mmnn": "constants", "method": "simsiam"}, {"contrastive": 6, "original": 1, "composites": 9}),
    ({"consistency": "none"}, {"contrastive": 4}),
    ({"lengths_per_step": 1, "composite_size": 112, "mmnn_every": 3},
     {"contrastive": 4, "original": 1, "composites": 0.75, "labelled": 0.25}),
    ({"recipe": "released", "lengths": (1,)}, {"contrastive": 4, "original": 5, "composites": 3, "labelled": 0.75}),
])  # fmt: skip
def test_the_cost_model_counts_forward_passes(options: dict, expected: dict) -> None:
    assert costs(resolve(options), ranks=1) == expected


def test_the_table_shows_shares_and_costs() -> None:
    config = resolve({"consistency": "none", "batch_size": 256})
    seconds = {"data wait": 0.1, "contrastive": 1.6, "optimiser": 0.2, "other": 0.1, "views": 0.02}
    lines = table(config, seconds, steps=10, ranks=1)
    assert lines[2].split() == ["contrastive", "160.00", "80.0%", "4.00", "40.00"]
    assert lines[5].split() == ["step", "200.00", "100%", "4.00", "50.00"]
    assert "1,280 images/s" in lines[6] and "waiting for data: 15.0%" in lines[6]
    assert "2.00 ms" in lines[7]
    seconds = {"contrastive": 1.0, "hypergradient": 0.6, "optimiser": 0.3, "other": 0.1}
    lines = table(config, seconds, steps=10, ranks=1)  # its passes are the encoder's
    assert lines[2].split() == ["hypergradient", "60.00", "30.0%"] and "waiting for data: 20.0%" in lines[6]


def test_the_command_leaves_a_trace_but_no_run(photo_folder: Path, tmp_path: Path, capsys: Capsys) -> None:
    output = tmp_path / "runs" / "look"
    turns = {"mmnn_every": 2, "lengths_per_step": 1, "composite_size": 16}
    assert main([*flags(data=photo_folder, output=output, **turns), "--profile"]) == 0
    shown = capsys.readouterr().out
    costs = {words[0]: words[-2] for line in shown.splitlines() if len(words := line.split()) == 5}
    assert (costs["contrastive"], costs["composites"], costs["labelled"]) == ("4.00", "0.75", "0.75")
    assert all(part in shown for part in ("data wait", "contrastive", "composites", "labelled", "optimiser", "per F"))
    assert not output.exists()
    with gzip.open(tmp_path / "runs" / "look-trace.json.gz") as file:
        assert json.load(file)["traceEvents"]


TURNS = {"mmnn_every": 1_000_000, "lengths_per_step": 1, "composite_size": 8}


@pytest.mark.parametrize("options", [{"consistency": "abs"}, {"hypergradient": "taylor"}, TURNS])
def test_hypergradient_passes_are_a_part(tmp_path: Path, capsys: Capsys, monkeypatch: Patch, options: dict) -> None:
    monkeypatch.setattr("cocor.monitor.profile._MOST_STEPS", 6)  # where long cycles are cut
    tiny = {"loader": "synthetic", "synthetic_images": 200, "image_size": 16}
    assert main([*flags(output=tmp_path / "look", **tiny, **options), "--profile"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    rows = {words[0]: words for words in lines if len(words) >= 3}
    assert "composites" in rows and ("hypergradient" in rows) == (options != TURNS)
    assert "hypergradient" not in rows or float(rows["hypergradient"][1]) > 0
