"""Small runs of cocor-train as processes: flags, metrics, final states."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cocor import checkpoint
from cocor.train import main

Done = subprocess.CompletedProcess[str]
Capture = pytest.CaptureFixture[str]
ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"
READMES = [f"{folder}README.md" for folder in ("", "benchmarks/", "cocor/", "cocor/eval/", "loaders/")]
PAGES = [*READMES, "cocor/API.md"]
LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID")
STEPS = 3  # an epoch: 24 photographs in batches of 8
EVERY_STEP = {"checkpoint_every_minutes": 1e-9}
SYNTHETIC = {"loader": "synthetic", "synthetic_images": 24}
SMALL = Path(__file__).parent / "small.yaml"


def flags(config: Any = SMALL, **options: Any) -> list[str]:
    return [f"--{key.replace('_', '-')}={value}" for key, value in {"config": config, **options}.items()]


def environment() -> dict[str, str]:
    """One thread a rank, and no trace of a launcher."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM_", *LAUNCHERS))}
    paths = filter(None, [str(ROOT), str(TESTS), os.environ.get("PYTHONPATH")])  # an empty one is the folder here
    return clean | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "cocor.train", *arguments]


def run(*arguments: str, program: Sequence[str] = ("-m", "cocor.train"), **variables: str) -> Done:
    """Run the command as a user starts it, with ``variables`` in its environment; empty ones are left out."""
    place = {name: value for name, value in (environment() | variables).items() if value}
    call = [*(["bash"] if program == ["bash"] else [sys.executable, *program]), *arguments]
    return subprocess.run(call, env=place, capture_output=True, text=True, check=False, timeout=300)


def metrics(folder: Path, kind: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


def final_state(folder: Path) -> dict[str, Any]:
    return checkpoint.load(folder / "checkpoints" / f"step_{2 * STEPS:07d}.pt")["training"]


def flat(state: Any, place: str = "") -> dict[str, Any]:
    """The leaves of nested containers by their path."""
    if isinstance(state, dict | list):
        items = state.items() if isinstance(state, dict) else enumerate(state)
        return {name: leaf for key, value in items for name, leaf in flat(value, f"{place}/{key}").items()}
    return {place: state}


def assert_same_bits(left: Any, right: Any) -> None:
    left, right = flat(left), flat(right)
    assert left.keys() == right.keys()
    for name, value in left.items():
        same = torch.equal(value, right[name]) if isinstance(value, Tensor) else value == right[name]
        assert same, name


def interrupted(unbroken: Path, folder: Path, step: int) -> None:
    """``unbroken`` as it would be had the process been killed in the middle of a log line, after saving ``step``."""
    shutil.copytree(unbroken, folder)
    for path in (folder / "checkpoints").iterdir():
        if int(path.stem.removeprefix("step_")) > step:
            path.unlink()
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "step": 7, "lo')


def start(*arguments: str, **options: Any) -> "subprocess.Popen[str]":
    """Start the command, with its errors to be read."""
    return subprocess.Popen(command(*arguments), env=environment(), stderr=subprocess.PIPE, text=True, **options)


def assert_resumes(folder: Path, step: int, **options: Any) -> None:
    """Train in ``folder``/whole, and resume its copy ``folder``/run from ``step``: all is equal at the end."""
    assert main(flags(**options, output=folder / "whole")) == 0
    interrupted(folder / "whole", folder / "run", step)
    assert main([*flags(**options, output=folder / "run"), "--resume"]) == 0
    assert_same_bits(final_state(folder / "run"), final_state(folder / "whole"))
    rows, expected = (metrics(folder / name, "samples") for name in ("run", "whole"))
    assert [row["index"] for row in rows] == [row["index"] for row in expected]
