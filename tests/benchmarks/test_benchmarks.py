"""Benchmarks: each command runs for real on tiny data, and figures are what they say they are."""

import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from helpers.manual_clock import HandClock, wound_by_hand
from PIL import Image

from benchmarks import common, scaling, throughput
from benchmarks.images import open_images
from benchmarks.loading import first_reads, timing, torch_peers
from benchmarks.loading.cases import Absent, Measured, Settings, measure
from benchmarks.loading.contenders import CONTENDERS
from benchmarks.loading.report import case_line
from benchmarks.loading.stages import Stage
from benchmarks.loading.timing import milliseconds, time_windows
from benchmarks.processes import alone, in_processes
from loaders.cpus import available_cores
from loaders.errors import UserError

ROOT = Path(__file__).parents[2]
LOADERS = ("dali", "torchvision")
STAGES: tuple[Stage, ...] = ("decode", "composites", "step")
Refusal = Callable[..., str]


def run(*words: object) -> str:
    """Run a benchmark as users do, from the repository's root; what it prints."""
    call = [sys.executable, *map(str, words)]
    done = subprocess.run(call, capture_output=True, text=True, cwd=ROOT, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_throughput_figures_agree(photo_folder: Path, tmp_path: Path) -> None:
    choice = [word for name in LOADERS for word in ("--loader", name)]
    choice += [word for name in STAGES for word in ("--stage", name)]
    small = ("--quick", "--gpus", 0, "--seconds", 0.1, "--batch-size", 4, "--images", 16, "--data", photo_folder)
    printed = run("benchmarks/throughput.py", *small, *choice, "--json", tmp_path / "out.json")
    assert "samples/s" in printed and "dali / torchvision" in printed
    result = json.loads((tmp_path / "out.json").read_text())
    assert result["machine"]["cores"] >= 1 and result["machine"]["torch"] == torch.__version__.partition("+")[0]
    assert result["data"]["images"] == 16 and result["data"]["mean_kilobytes"] > 1
    assert result["settings"]["batch_size"] == 4 and not result["settings"]["on_gpu"]
    cases = {(case["loader"], case["stage"]): case for case in result["cells"]}
    assert list(cases) == [
        (loader, stage) for loader in LOADERS for stage in STAGES if stage in CONTENDERS[loader].stages
    ]
    assert [case["reason"] for case in cases.values() if "reason" in case] == []
    for case in cases.values():
        assert 0 < case["cores_busy"] < 4 * result["machine"]["cores"]
        assert case["samples_per_s_per_core"] == pytest.approx(case["samples_per_s"] / case["cores_busy"])
        views = 0 if case["stage"] == "decode" else 6
        assert case["views_per_s"] == pytest.approx(views * case["samples_per_s"])
        assert 0 <= case["batch_ms_p50"] <= case["batch_ms_p99"]
        assert case["batches"] >= 3 * case["windows"] >= 3
        assert (case["gpu_share"] is not None) == (case["stage"] == "step")
        assert case["gpu_share"] is None or case["gpu_share"] < 1
    ratios = {ratio["name"]: ratio["samples_per_s"] for ratio in result["ratios"]}
    rates = {loader: cases[loader, "composites"]["samples_per_s"] for loader in LOADERS}
    assert ratios["dali / torchvision"] == pytest.approx(rates["dali"] / rates["torchvision"])


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Refusal:
    """Runs a benchmark here that must end with exit code 2 before it prints a thing; its one line."""

    def refused(name: str, *words: object) -> str:
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *map(str, words)])
        assert common.command(f"{name}.py", importlib.import_module(f"benchmarks.{name}").main) == 2
        printed = capsys.readouterr()
        (line,) = printed.err.splitlines()
        assert line.startswith(f"{name}.py: error: ") and not printed.out
        return line.removeprefix(f"{name}.py: error: ")

    return refused


@pytest.mark.parametrize(
    ("words", "machine", "expected"),
    [
        ("", {"gpus": 0, "cores": 2}, {"on_gpu": False, "ranks": 1, "batch_size": 64, "workers": 2}),
        ("", {"gpus": 4, "cores": 64}, {"on_gpu": True, "ranks": 1, "batch_size": 256, "workers": 64}),
        ("--gpus 4", {"gpus": 4, "cores": 64}, {"ranks": 4, "batch_size": 1024, "workers": 16}),
        ("--gpus 0", {"gpus": 4, "cores": 64}, {"on_gpu": False, "backbone": "resnet18"}),
        ("--gpus 2", {"gpus": 1, "cores": 2}, "--gpus 2: there are 1 here"),
        ("--gpus 2 --batch-size 7", {"gpus": 2, "cores": 2}, "--batch-size 7: take a multiple of 2"),
    ],
)
def test_settings_follow_the_machine(words: str, machine: dict, expected: dict | str) -> None:
    options = throughput.arguments(words.split())
    if isinstance(expected, str):
        with pytest.raises(UserError, match=expected):
            throughput.settings_of(options, machine)
    else:
        settings = vars(throughput.settings_of(options, machine))
        assert {key: settings[key] for key in expected} == expected


def test_cases_are_measured_apart(photo_folder: Path) -> None:
    chosen = open_images(photo_folder, 16)
    together = measure("synthetic", "step", chosen, Settings(False, 2, 8, 16, 1, 0.2, 0.65, "test_resnet"))
    assert isinstance(together, Measured), together  # two ranks, which share the batch
    assert together.samples_per_s > 0 and together.gpu_share is not None
    case = measure("synthetic", "step", chosen, Settings(False, 1, 4, 16, 1, 0.1, 0.65, "no_such_network"))
    assert isinstance(case, Absent) and "no_such_network" in case.reason


@pytest.mark.parametrize(("peer", "views"), [("solo-learn", 2), ("lightly", 2), ("kornia", 6), ("torchvision-gpu", 6)])
def test_peers_make_their_views(photo_folder: Path, peer: str, views: int) -> None:
    """On a CPU, which those for a GPU take for their device."""
    settings = Settings(False, 1, 4, 32, 1, 0.1, 0.65, "test_resnet")
    case = measure(peer, CONTENDERS[peer].stages[-1], open_images(photo_folder, 16), settings)
    if isinstance(case, Absent):
        assert peer in ("kornia", "lightly") and case.reason == f"{peer} is not installed: pip install {peer}"
    else:
        assert case.views_per_s == pytest.approx(views * case.samples_per_s) and case.views_per_s > 0


def test_first_reads_are_late(photo_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By compiled code, C and Python; files of other folders are not."""
    monkeypatch.setenv("LD_PRELOAD", "")
    first_reads.prepare()
    jpeg = next(photo_folder.glob("*/*.jpg"))
    printed = run("-c", OPENERS, photo_folder, jpeg)
    compiled, stream, python, elsewhere = map(float, printed.split())
    assert elsewhere < 0.2 <= min(compiled, stream, python)


OPENERS = r"""
import ctypes, sys, time
from pathlib import Path
from benchmarks.loading.first_reads import begin
from loaders.datasets import file_reader
import numpy as np
folder, jpeg = map(Path, sys.argv[1:])
path, data = np.frombuffer(bytes(jpeg) + b"\0", np.uint8).copy(), np.empty(jpeg.stat().st_size, np.uint8)
file_reader._read_file(path, data)
begin(folder, 200)
for opener in (
    lambda: file_reader._read_file(path, data), lambda: ctypes.CDLL(None).fopen(bytes(jpeg), b"rb"),
    jpeg.read_bytes, Path("README.md").read_bytes
):
    start = time.perf_counter()
    opener()
    print(time.perf_counter() - start)
"""


def test_the_probe_compares_with_scikit_learn(tmp_path: Path) -> None:
    target = tmp_path / "probe.json"
    small = ("--images", 300, "--dimensions", 8, "--classes", 3, "--json", target)
    assert "scikit-learn; objectives differ by" in run("benchmarks/probe.py", *small)
    found = json.loads(target.read_text())
    assert found["converged"] == 45 and abs(found["one_fit"]["relative_difference"]) < 1e-4
    script = "import sys; sys.modules['sklearn'] = None; from benchmarks import probe; probe.main()"
    assert "not compared: scikit-learn is not installed" in run("-c", script, *small)
    assert json.loads(target.read_text())["iterations"] > 0


@pytest.mark.parametrize(("windows", "spread"), [(1, None), (3, 0.1)])
def test_a_single_window_has_no_spread(windows: int, spread: float | None) -> None:
    settings = Settings(True, 1, 64, 224, 16, 6.0, 0.65, "resnet50")
    case = Measured("torch", "step", 500.0, 0.1 * (windows > 1), 3000.0, 50.0, 10.0, 1.0, 2.0, 16, windows)
    assert scaling.row_of(case, settings, {})["spread"] == spread
    assert case_line(case).split()[5] == ("-" if spread is None else "10%")


ZEROS = ["--batch-size 0", "--images 0", "--images -3", "--seconds 0", "--seconds nan", "--workers 0",
         "--size 0", "--gpus -1", "--hw-decoder-load 2"]  # fmt: skip


@pytest.mark.parametrize(
    ("benchmark", "words", "expected"),
    [
        *(("throughput", words, words.replace(" ", ": ") + " must be ") for words in ZEROS),
        ("throughput", "--quick --data no/such/folder", "--data no/such/folder: no such folder"),
        ("kernel", "--batches 64,0", "--batches: "), ("kernel", "--json /proc/x.json", "--json: "),
        ("prep", "rates --data . --repeats 0", "--repeats: "), ("prep", "agreement --batch-size 0", "--batch-size: "),
        ("probe", "--penalty 0", "--penalty: "), ("probe", "--classes 2", "--classes: 2 must be at least 3"),
        ("scaling", "--seconds 0", "--seconds: "), ("step", "--steps 0", "--steps: "),
        ("step", "--batch-sizes 1 --size 32 --methods moco", "batch_size: 1"),  # no BatchNorm of one image
        ("step", "--options composit-size=16", "--options composit-size=16: no option of a step; did you mean compos"),
        ("step", "--options foo=1", "--options foo=1: no option of a step; there are composite-size, lengths-per-step"),
        ("step", "--options mmnn-every=often", "--options mmnn-every: 'often' is not a whole number"),
        ("step", "--size 64 --options composite-size=65", "composite_size: 65 is no size between 4 and the 64 of"),
    ],
)  # fmt: skip
def test_impossible_wishes_are_refused_early(benchmark: str, words: str, expected: str, refused: Refusal) -> None:
    assert refused(benchmark, *words.split()).startswith(expected)


def test_wishes_that_depend_on_the_machine(tmp_path: Path, refused: Refusal) -> None:
    (tmp_path / "stored.beton").touch()
    line = refused("throughput", "--quick", "--data", tmp_path / "stored.beton")
    assert f"{tmp_path}/stored.beton: " in line and "give their folder" in line
    assert torch.cuda.is_available() or refused("scaling").startswith("there is no GPU here")


def test_prep_rates_and_kernel_run(photo_folder: Path, tmp_path: Path) -> None:
    words = ("--data", photo_folder, "--shorter-side", 32, "--repeats", 1, "--work", tmp_path)
    lines = run("-m", "benchmarks.prep", "rates", *words).splitlines()
    assert sum("x loop a CPU second" in line for line in lines) == 2 * (1 + 2 * len({1, available_cores()}))
    words = ("--cpu", "--samples", 2, "--size", 32, "--repeats", 1, "--json", tmp_path / "x.json")
    assert "views a second and core: pillow" in run("benchmarks/kernel.py", *words)
    assert json.loads((tmp_path / "x.json").read_text())["rows"][-1]["cocor_ms"] > 0


def test_the_step_runs_anywhere(tmp_path: Path) -> None:
    options = ("--options", "none", "composite-size=16,lengths-per-step=1,mmnn-every=2")
    words = ("--batch-sizes", 4, "--size", 32, "--steps", 1, "--methods", "moco", *options)
    run("benchmarks/step.py", *words, "--json", tmp_path / "step.json")
    plain, cocor, cheaper = json.loads((tmp_path / "step.json").read_text())["rows"]
    assert cocor["cocor"] and not plain["cocor"] and min(plain["images_per_s"], cocor["images_per_s"]) > 0
    assert [row["option"] for row in (plain, cocor, cheaper)] == ["none", *options[1:]]
    assert (cocor["memory_gib"] is None) == (not torch.cuda.is_available())  # a CPU's is not measured
    for row, units in ((plain, 4), (cocor, 4 + 1 + 9 + 1.5), (cheaper, 4 + 1 + 0.75 + 0.75)):  # 2 labelled images of 4
        assert row["forward_equivalents_per_s"] == pytest.approx(units * row["images_per_s"])


def test_processes_report_how_they_end() -> None:
    fine, raised, crashed = in_processes([(os.getppid, ()), (int, ("x",)), (os.abort, ())], 60)
    assert isinstance(fine, int)
    assert raised.startswith("ValueError: invalid literal")
    assert crashed == "ended by signal 6"
    assert in_processes([(time.sleep, (60,))], 0.5) == ["no result within 0 s"]
    with pytest.raises(UserError, match="invalid literal"):
        alone(int, "x")


class TestWindows:
    """By a clock that only sleeping moves."""

    @pytest.fixture
    def clock(self, monkeypatch: pytest.MonkeyPatch) -> HandClock:
        return wound_by_hand(timing, monkeypatch)

    def test_windows_hold_whole_bursts(self, clock: HandClock) -> None:
        def bursts() -> Iterator[int]:
            while True:
                clock.sleep(0.03)
                yield from (10, 10, 10)

        windows = time_windows(bursts(), 0.3, burst=3)
        assert len(windows) == 3
        for window in windows:
            assert len(window.intervals) == 12 and sum(window.intervals) == pytest.approx(window.seconds)
            assert window.samples == 120 and window.rate == pytest.approx(1000)
        assert (milliseconds(windows, 99), milliseconds(windows, 50)) == (pytest.approx(30), 0)
        assert len(time_windows(bursts(), 0.01)) == 1  # a slow stream gets one window


def test_only_what_all_decode_is_decoded(photo_folder: Path, tmp_path: Path) -> None:
    jpeg, png = str(next(photo_folder.glob("*/*.jpg"))), str(tmp_path / "0.png")
    Image.open(jpeg).save(png)
    assert torch_peers.decodable([png, jpeg]) == ([jpeg], "1 of 2 images")
    with pytest.raises(UserError, match="can decode none of the images"):
        torch_peers.decodable([png])
