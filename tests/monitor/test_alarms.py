"""Real steps: the alarms of ``cocor.monitor.health`` stay silent in healthy runs and go off in those that are made
to fail."""

import logging
from collections.abc import Callable
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import pytest
from helpers.steps import WORLD, build, config_for
from PIL import Image

from cocor.methods import METHODS
from cocor.monitor import health

EACH_METHOD = pytest.mark.parametrize("method", METHODS)
ALARMS = {"collapse": "the features have collapsed", "dead": "the MMNN does not learn", "chance": "that of guessing"}
STEPS = 12


@pytest.fixture
def alarms(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> Callable[..., set[str]]:
    """Those that go off within the first steps of a run; they usually look at more of them."""
    monkeypatch.setattr(health, "EVERY", STEPS)

    def steps(folder: Path, **options: Any) -> set[str]:
        options = {"lr": 0.02, "mmnn_lr": 0.05, "epochs": STEPS, "image_size": 16, "output": tmp_path} | options
        step, pairs = build(config_for(folder, **options))
        watching = health.HealthMonitor(step.config, WORLD, [str(number) for number in range(1000)])
        with caplog.at_level(logging.WARNING):
            for number, (batch, labelled) in enumerate(islice(cycle(pairs), STEPS)):
                watching(number + 1, step(batch, labelled, number), batch, labelled, step.learning_rate)
        return {name for name, words in ALARMS.items() if words in caplog.text}

    return steps


@EACH_METHOD
def test_healthy_steps_are_quiet(alarms: Callable[..., set[str]], photo_folder: Path, method: str) -> None:
    assert alarms(photo_folder, method=method) == set()


@EACH_METHOD
def test_images_all_alike_collapse(alarms: Callable[..., set[str]], tmp_path: Path, method: str) -> None:
    for number in range(24):
        place = tmp_path / "images" / f"class{number % 2}"
        place.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (32, 32), (90, 120, 60)).save(place / f"{number}.png")
    plain = {"jitter_prob": 0, "grayscale_prob": 0, "blur_prob": (0,), "solarize_prob": (0,), "consistency": "none"}
    went_off = alarms(tmp_path / "images", method=method, **plain)
    assert "collapse" in went_off and went_off <= {"collapse", "chance"}


@pytest.mark.parametrize("method", ["moco", "simsiam"])
def test_an_mmnn_that_nothing_reaches_is_dead(alarms: Callable[..., set[str]], photo_folder: Path, method: str) -> None:
    assert alarms(photo_folder, method=method, consistency_weight=0.0) == {"dead"}
