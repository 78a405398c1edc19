"""Trackers get what a run logs, and go on with it after a resume; one that fails costs a line, not the run."""

import json
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.runs import EVERY_STEP, SYNTHETIC, flags

from cocor.monitor import track
from cocor.monitor.track import Tracked, Tracking
from cocor.train import main
from loaders.errors import UserError

STEPS = [1, 2, 3, 4, 5, 6]


def loss(step: int, value: float = 1.0) -> dict[str, Any]:
    return {"kind": "train", "step": step, "time_s": 1e9, "loss": value, "images_per_s": 9.0, "many": [1], "lost": None}


def wandb_records(content: bytes) -> Iterator[bytes]:
    """Records of an offline run's file: LevelDB's log format, blocks of 32 KiB after a header of 7 bytes."""
    at, parts = 7, b""
    while at + 7 <= len(content):
        length, kind = int.from_bytes(content[at + 4 : at + 6], "little"), content[at + 6]
        parts += content[at + 7 : at + 7 + length]
        at += 7 + length
        if 2**15 - at % 2**15 < 7:  # no room for another record's header
            at += 2**15 - at % 2**15
        if kind in (1, 4):  # a whole record, the last part of one
            yield parts
            parts = b""


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of a run that all trackers watched, killed after step 4 and resumed from step 3."""
    pytest.importorskip("tensorboard")
    pytest.importorskip("wandb")
    pytest.importorskip("mlflow")
    root = tmp_path_factory.mktemp("watched")
    watched = flags(**SYNTHETIC, **EVERY_STEP, output=root / "run", track="tensorboard,wandb,mlflow", plot=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_MODE", "offline")
        patch.chdir(root)  # where MLflow keeps pictures
        patch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{root}/mlflow.db")
        assert main(watched) == 0
        for late in (root / "run/checkpoints").glob("step_000000[456].pt"):
            late.unlink()
        assert main([*watched, "--resume"]) == 0
        yield root / "run"


def test_tensorboard_reads_the_curves(resumed: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(resumed / "tracking"))
    found.Reload()
    assert [point.step for point in found.Scalars("train/loss")] == STEPS
    assert found.Scalars("system/images_per_s")[0].value > 0
    assert set(found.Tags()["images"]) == {"views", "plot"}
    (text, _) = found.Tensors("configuration/text_summary")
    assert b"backbone: test_resnet" in text.tensor_proto.string_val[0]


def test_mlflow_keeps_one_run(resumed: Path) -> None:
    from mlflow import MlflowClient

    client = MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name("cocor").experiment_id])
    assert (run.info.run_name, run.info.status, run.data.params["backbone"]) == ("run", "FINISHED", "test_resnet")
    points = client.get_metric_history(run.info.run_id, "train/loss")
    assert [point.step for point in sorted(points, key=lambda point: point.timestamp)] == [*STEPS, 4, 5, 6]
    assert {artifact.path for artifact in client.list_artifacts(run.info.run_id)} == {"views.png", "plot.png"}


def test_wandb_keeps_one_run(resumed: Path) -> None:
    from wandb.proto.wandb_internal_pb2 import Record

    steps, ids = [], set()
    for file in sorted((resumed / "tracking/wandb").glob("offline-run-*/*.wandb")):
        for record in map(Record.FromString, wandb_records(file.read_bytes())):
            ids |= {record.run.run_id} - {""}
            items = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
            steps += [json.loads(items["step"])] if "train/loss" in items else []
    assert (steps, len(ids)) == ([*STEPS, 4, 5, 6], 1)


def test_a_lost_server_costs_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody answers mlflow; tensorboard goes on."""
    pytest.importorskip("mlflow")
    monkeypatch.setattr(track, "_PATIENCE", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{silent.getsockname()[1]}")
        tracking = Tracking(["mlflow", "tensorboard"], Tracked(tmp_path, {"lr": 0.1}, 0))
        for step in STEPS:
            tracking(loss(step))
        tracking.close(True)
    assert caplog.messages == ["--track mlflow: it has not taken everything within 0 s; the run goes on without it"]
    assert len(list((tmp_path / "tracking").iterdir())) == 1


def test_a_tracker_that_fails_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("tensorboard")
    tracking = Tracking(["tensorboard"], Tracked(tmp_path, {}, 0))
    for record in (loss(1), loss(2) | {"kind": "picture", "file": "gone.png"}, loss(3)):
        tracking(record)
    tracking.close(True)
    (message,) = caplog.messages
    assert "gone.png" in message and message.endswith("; the run goes on without it")


def test_missing_trackers_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "no_such_tool").mkdir()  # as wandb leaves one of its name behind
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError, match="--track no_such_tool: is not installed: pip install no_such_tool"):
        track.check(["no_such_tool"])


def test_ranks_of_torchrun_miss_them_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # as if it were not installed
    for key, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(key, value)
    assert main(flags(**SYNTHETIC, track="wandb", output=tmp_path / "run")) == 2
    assert "--track wandb: is not installed: pip install wandb" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
