"""The run log: one honest line an interval, valid JSON always, nothing doubled by a resume, silence of other ranks."""

import json
import logging
import os
import pty
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.manual_clock import wound_by_hand

import cocor.log
from cocor.distributed.collectives import World
from cocor.log import RunLog, duration, set_up_logging
from cocor.run_dir import METRICS

CPU = torch.device("cpu")
MAIN, OTHER = World(0, 0, 1, CPU), World(1, 1, 1, CPU)


def records(folder: Path) -> list[dict[str, Any]]:
    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in (folder / METRICS).read_text().splitlines()]


def run_log(folder: Path, world: World = MAIN, **settings: Any) -> RunLog:
    return RunLog(folder, world, **({"batch_size": 8, "total_steps": 10, "log_every": 4} | settings))


def test_a_line_holds_the_means_of_its_interval(tmp_path: Path) -> None:
    log = run_log(tmp_path)
    shared = torch.zeros(())  # a step that reuses the memory of its metrics, as a CUDA graph does
    for step in range(1, 11):
        shared.fill_(step)
        metrics = {"loss": shared} | ({"late": shared} if step > 6 else {})
        written = log.step(step, 1, 0.1, metrics)
        assert (written is None) == (step not in (4, 8, 10))
    log.close()
    lines = records(tmp_path)
    assert [(line["kind"], line["step"], line["loss"], line.get("late")) for line in lines] == [
        ("train", 4, 2.5, None), ("train", 8, 6.5, 7.5), ("train", 10, 9.5, 9.5),
    ]  # fmt: skip
    assert {"epoch", "time_s", "lr", "images_per_s", "data_wait_share", "time_left_s"} <= lines[0].keys()
    assert lines[-1]["time_left_s"] == 0


def test_squares_become_deviations(tmp_path: Path) -> None:
    log = run_log(tmp_path)
    for step, value in enumerate([1.0, 2.0, 3.0, 6.0], start=1):
        log.step(step, 1, 0.1, {"product_2": torch.tensor(value), "product_squared_2": torch.tensor(value**2)})
    log.close()
    (line,) = records(tmp_path)
    assert "product_squared_2" not in line
    assert (line["product_2"], line["product_deviation_2"]) == (3.0, pytest.approx(3.5**0.5))


def test_speed_and_waiting_are_those_of_the_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = wound_by_hand(cocor.log, monkeypatch)

    closed = []

    def slow() -> Iterator[int]:
        try:
            for number in range(4):
                clock.sleep(0.3)
                yield number
        finally:
            closed.append(len(closed) + 1)

    log = run_log(tmp_path, total_steps=8)
    for epoch, seconds in ((0, 0.1), (1, 0.2)):
        for number in log.timed(slow()):
            clock.sleep(seconds)
            log.step(4 * epoch + number + 1, epoch, 0.1, {"loss": torch.tensor(1.0)})
        clock.sleep(5)  # an evaluation between epochs is no part of the steps
    timed = log.timed(slow())
    next(timed)
    timed.close()  # type: ignore[attr-defined]
    assert closed == [1, 2, 3]
    for line, share, rate in zip(records(tmp_path), (0.75, 0.6), (20, 16), strict=True):
        assert (line["data_wait_share"], line["images_per_s"]) == (pytest.approx(share), pytest.approx(rate))


def test_a_slow_run_shows_that_it_moves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its first step at once, then a line each half minute, and once what would make it faster."""
    clock = wound_by_hand(cocor.log, monkeypatch)
    caplog.set_level(logging.INFO)
    log = run_log(tmp_path, total_steps=7000, log_every=50)
    for step in range(1, 6):
        clock.sleep(20)
        log.step(step, 0, 0.1, {"loss": torch.tensor(1.0)})
    log.close()
    assert caplog.messages == [
        "epoch 0  step 1/7000  loss 1.0000",
        "epoch 0  step 3/7000  loss 1.0000  20.0 s a step  38h52m left",
        "that is 1.6 days; what shortens it: a GPU, a smaller --backbone or --image-size, fewer --epochs",
        "epoch 0  step 5/7000  loss 1.0000  20.0 s a step  38h51m left",
    ]
    assert records(tmp_path) == []


def test_numbers_that_are_not_finite_become_null(tmp_path: Path) -> None:
    log = run_log(tmp_path, log_every=1)
    log.step(1, 0, float("inf"), {"loss": torch.tensor(float("nan"))})
    log.event("x", 1, 0, {"many": torch.tensor([1.0, float("inf")]), "deep": {"a": [float("-inf"), 2]}})
    first, second = records(tmp_path)  # written unbuffered
    assert first["loss"] is None and first["lr"] is None
    assert second["many"] == [1.0, None] and second["deep"] == {"a": [None, 2]}


def test_a_resumed_run_doubles_no_line(tmp_path: Path) -> None:
    log = run_log(tmp_path, log_every=1)
    for step in range(1, 7):
        log.step(step, 0, 0.1, {"loss": torch.tensor(float(step))})
    log.close()
    with (tmp_path / METRICS).open("a") as file:
        file.write('{"kind": "train", "st')  # killed while writing
    log = run_log(tmp_path, log_every=1, start_step=4)
    for step in range(5, 11):
        log.step(step, 0, 0.1, {"loss": torch.tensor(float(step))})
    log.close()
    assert [line["step"] for line in records(tmp_path)] == list(range(1, 11))


def test_only_the_main_rank_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logging(OTHER, tmp_path / "log.txt")
    log = run_log(tmp_path, OTHER, log_every=1)
    log.step(1, 0, 0.1, {"loss": torch.tensor(1.0)})
    logging.getLogger("loaders.dali.loader").warning("cannot read x.jpg")
    log.close()
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr().err == "[rank 1] cannot read x.jpg\n"


def test_log_txt_has_every_line_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for word in ("first", "second"):
        set_up_logging(MAIN, tmp_path / "log.txt")
        logging.getLogger("cocor.train").info(word)
    log = run_log(tmp_path, log_every=1)
    log.step(1, 0, 0.1, {"loss": torch.tensor(1.0)})
    logging.getLogger("cocor").info("name \udcff")  # a file name that is not UTF-8
    log.close()
    lines = (tmp_path / "log.txt").read_text().splitlines()
    assert [line.split(" INFO ")[1].split("  ")[0] for line in lines] == ["first", "second", "epoch 0", "name \\udcff"]
    plain = capsys.readouterr().err.splitlines()
    assert plain[2].startswith("epoch 0  step 1/10  loss 1.0000  lr 0.1") and plain[2].endswith("left")


_TERMINAL = """
import logging, sys, torch
from pathlib import Path
from cocor.distributed.collectives import World
from cocor.log import RunLog, set_up_logging
world = World(0, 0, 1, torch.device("cpu"))
set_up_logging(world, Path(sys.argv[1]) / "log.txt")
log = RunLog(Path(sys.argv[1]), world, batch_size=8, total_steps=4, log_every=2)
for number, _ in enumerate(log.timed(range(4)), 1):
    log.step(number, 0, 0.1, {"loss": torch.tensor(1.0)})
logging.getLogger("cocor").info("a message")
log.close()
"""


def test_a_terminal_shows_a_bar_in_place_of_lines(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 160))
    with subprocess.Popen([sys.executable, "-c", _TERMINAL, str(tmp_path)], stderr=theirs) as run:
        os.close(theirs)
        shown = ""
        with suppress(OSError):  # the end of a terminal
            while chunk := os.read(ours, 4096):
                shown += chunk.decode()
    os.close(ours)
    assert run.returncode == 0, shown
    assert "4/4" in shown and "loss 1.0000" in shown and "waiting for data" in shown and "a message" in shown
    assert "epoch 0" not in shown
    assert (tmp_path / "log.txt").read_text().count("epoch 0") == 3  # the first step has one of its own


def test_durations_read_well() -> None:
    assert [duration(seconds) for seconds in (5, 75, 3600 * 26 + 120)] == ["0m05s", "1m15s", "26h02m"]


@pytest.mark.gpu
def test_the_wait_on_a_gpu_is_its_idle_time(tmp_path: Path) -> None:
    world = World(0, 0, 1, torch.device("cuda"))
    work = torch.randn(4096, 4096, device="cuda")

    def batches(pause: float) -> Iterator[int]:
        for number in range(20):
            time.sleep(pause)
            yield number

    def wait_share(pause: float, products: int) -> float:
        log = run_log(tmp_path, world, total_steps=20, log_every=20)
        for number in log.timed(batches(pause)):
            for _ in range(products):  # 2 to 3 ms each on the GPU in float32, queued at once
                work @ work
            log.step(number + 1, 0, 0.1, {"loss": work[0, 0]})
        log.close()
        return float(records(tmp_path)[-1]["data_wait_share"])

    wait_share(0.0, 30)
    assert wait_share(0.002, 30) < 0.1  # hidden behind the GPU's work, although the host slept
    assert wait_share(0.5, 3) > 0.5  # also where other programs use most of the GPU
