"""Test where a run may go on: other ranks, other images, damaged files, a folder in use, half a start."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from helpers import runs
from helpers.runs import (
    EVERY_STEP,
    STEPS,
    SYNTHETIC,
    Capture,
    assert_same_bits,
    final_state,
    flags,
    interrupted,
    metrics,
)
from torch import Tensor

from cocor import checkpoint, run_dir
from cocor.config.options import Config
from cocor.config.resolve import load
from cocor.train import main, resuming_after_restart
from loaders.errors import UserError
from loaders.files import TEMPORARY

PLAIN = {"consistency": "none", "loader": "torch"}
TIMES = ("time_s", "time_left_s", "images_per_s", "data_wait_share")
NFNET = {"backbone": "test_nfnet", "loader": "dali", "log_samples": True, **EVERY_STEP}


@pytest.fixture(scope="module")
def plain(photo_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two epochs of plain MoCo. Read only, do not change."""
    folder = tmp_path_factory.mktemp("runs") / "plain"
    assert main(flags(data=photo_folder, output=folder, **PLAIN, **EVERY_STEP)) == 0
    return folder


@pytest.fixture
def copied(plain: Path, tmp_path: Path) -> Path:
    """A copy of that run, which the test may change."""
    return Path(shutil.copytree(plain, tmp_path / "run"))


def again(folder: Path, data: Path, *more: str, **options: Any) -> list[str]:
    return [*flags(data=data, output=folder, **PLAIN, **options), "--resume", *more]


def error(capsys: Capture) -> str:
    """The last line that was printed."""
    return capsys.readouterr().err.splitlines()[-1]


def change(folder: Path, step: int, edit: Callable[[dict[str, Any]], None]) -> None:
    """Edit the checkpoint of ``step``, which becomes the newest."""
    for path in (folder / "checkpoints").iterdir():
        if int(path.stem.removeprefix("step_")) > step:
            path.unlink()
    state = checkpoint.load(folder / "checkpoints" / f"step_{step:07d}.pt")
    edit(state)
    checkpoint.save(folder / "checkpoints", state, keep=100)


class TestOtherRanks:
    def test_two_ranks_resume_the_run_of_one(self, photo_folder: Path, tmp_path: Path) -> None:
        """Without BatchNorm, whose statistics are each rank's own, up to rounding; and one rank that of two."""
        options, whole, folder = (
            NFNET | {"data": photo_folder, "val_data": photo_folder},
            tmp_path / "1",
            tmp_path / "2",
        )
        assert main(flags(**options, output=whole)) == 0
        interrupted(whole, folder, step=2)
        two = runs.run(*flags(**options, output=folder, cpu_ranks=2), "--resume")
        assert two.returncode == 0, two.stderr
        assert "other ranks, the same batches and steps: 1 rank, 8 images a rank" in two.stderr
        assert "2 x cpu, fp32, eager, 4 images a step and rank" in (folder / "log.txt").read_text()
        left, right = runs.flat(final_state(whole)), runs.flat(final_state(folder))
        assert left.keys() == right.keys()
        for name, value in left.items():
            if isinstance(value, Tensor):
                torch.testing.assert_close(right[name], value, rtol=1e-3, atol=1e-5, msg=name)
        interrupted(folder, tmp_path / "back", step=4)
        assert main([*flags(**options, output=tmp_path / "back"), "--resume"]) == 0
        for run in (folder, tmp_path / "back"):
            assert [(row["step"], row["index"]) for row in metrics(run, "samples")] == [
                (row["step"], row["index"]) for row in metrics(whole, "samples")
            ]
        norms = {"gradient_contrastive", "gradient_consistency"}  # means of the ranks' own, which are larger
        names = sorted(metrics(whole, "train")[0].keys() - {*TIMES, "kind", *norms})  # all else that is logged
        assert {"consistency_loss", "contrastive_top1"} <= {*names}
        for one, other in zip(metrics(whole, "train"), metrics(folder, "train"), strict=True):
            assert [other[name] for name in names] == pytest.approx([one[name] for name in names], rel=1e-3, abs=1e-6)
        assert [line["step"] for line in metrics(folder, "knn")] == [0, STEPS, 2 * STEPS]
        for epoch in (0, 1):
            rows = [row for row in metrics(folder, "samples") if row["epoch"] == epoch]
            assert sorted(index for row in rows for index in row["index"]) == list(range(24))

    def test_other_batchnorm_batches_need_force(self, copied: Path, photo_folder: Path, capsys: Capture) -> None:
        ranks = {"ranks": 2, "images a rank": 4, "images to a BatchNorm": 4, "BatchNorm groups of keys": 2}
        change(copied, 2, lambda state: state.update(geometry=ranks))  # as two ranks would have saved it
        assert main(again(copied, photo_folder)) == 2
        line = error(capsys)
        assert "2 ranks, 4 images a rank, 4 images to a BatchNorm, 2 BatchNorm groups of keys in the checkpoint" in line
        assert "1 rank, 8 images a rank, 8 images to a BatchNorm" in line and "--force-ranks" in line
        assert main(again(copied, photo_folder, "--force-ranks")) == 0
        assert "as asked (--force-ranks)" in (copied / "log.txt").read_text() + capsys.readouterr().err
        assert "force_ranks" not in (copied / "config.yaml").read_text()


class TestOtherImages:
    def test_they_are_refused_or_asked_for(self, copied: Path, photo_copy: Path, capsys: Capture) -> None:
        (copied / "checkpoints" / "step_0000006.pt").unlink()
        (photo_copy / "coffee" / "0.jpg").rename(photo_copy / "coffee" / "new.jpg")
        assert main(again(copied, photo_copy)) == 2
        line = error(capsys)
        assert "data: other images: other names" in line and "--force-data goes on with them" in line
        assert main(again(copied, photo_copy, "--force-data")) == 0
        assert "other images than in the checkpoint" in capsys.readouterr().err
        assert [row["step"] for row in metrics(copied, "train")] == list(range(1, 2 * STEPS + 1))

    def test_contents_are_compared_on_request(
        self, photo_folder: Path, photo_copy: Path, tmp_path: Path, capsys: Capture
    ) -> None:
        """Copies keep their modification times here; other ones are refused unless contents are known and equal."""
        folder, victim = tmp_path / "run", photo_copy / "coffee" / "0.jpg"
        assert main(flags(data=photo_folder, output=folder, **PLAIN, epochs=1, verify_data=True)) == 0
        saved = checkpoint.load(folder / "checkpoints" / f"step_{STEPS:07d}.pt")
        assert saved["files"].keys() == {"kind", "lengths", "times", "contents"}
        assert "verify_data" not in (folder / "config.yaml").read_text()
        usual = {"epochs": 1}
        assert main(again(folder, photo_copy, **usual)) == 0
        os.utime(victim)
        assert main(again(folder, photo_copy, **usual)) == 2
        assert "other modification times, all of the same lengths; --verify-data compares" in error(capsys)
        assert main(again(folder, photo_copy, "--verify-data", **usual)) == 0
        content = bytearray(victim.read_bytes())
        content[-100] ^= 1
        victim.write_bytes(content)
        assert main(again(folder, photo_copy, "--verify-data", **usual)) == 2
        assert "other images: other contents of files" in error(capsys)
        victim.write_bytes(content + b"\0")  # the same size in pixels
        assert main(again(folder, photo_copy, **usual)) == 2
        assert "other images: other lengths of files" in error(capsys)
        assert main(again(folder, photo_copy, "--force-data", **usual)) == 0


class TestCheckpoints:
    def test_a_truncated_newest_is_passed_over(self, plain: Path, copied: Path, photo_folder: Path) -> None:
        newest = copied / "checkpoints" / "step_0000006.pt"
        newest.write_bytes(newest.read_bytes()[:-100])
        assert main(again(copied, photo_folder)) == 0
        assert f"going on from {copied}/checkpoints/step_0000005.pt" in (copied / "log.txt").read_text()
        assert_same_bits(final_state(copied), final_state(plain))

    def test_milestones_stay(self, photo_folder: Path, tmp_path: Path) -> None:
        options = {"epochs": 3, "keep_checkpoints": 1, "keep_every_epochs": 2, "checkpoint_every_epochs": 3}
        assert main(flags(data=photo_folder, output=tmp_path / "run", **PLAIN, **options)) == 0
        found = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
        assert found == [f"step_{2 * STEPS:07d}.pt", f"step_{3 * STEPS:07d}.pt"]

    def test_a_full_disk_keeps_old_checkpoints(self, plain: Path, photo_folder: Path, tmp_path: Path) -> None:
        """By a limit on the size of files."""
        folder = tmp_path / "run"
        interrupted(plain, folder, step=2)
        before = {path: path.read_bytes() for path in (folder / "checkpoints").iterdir()}
        arguments = again(folder, photo_folder, **EVERY_STEP)
        done = runs.run("-c", 'ulimit -f 1000; exec "$@"', "bash", *runs.command(*arguments), program=["bash"])  # KiB
        errors = [line for line in done.stderr.splitlines() if "cannot write" in line]
        assert done.returncode == 2 and "no checkpoint of step 3; training goes on, older ones are kept" in errors[0]
        assert errors[-1].startswith("cocor-train: error: cannot write step_0000006.pt")
        assert {path: path.read_bytes() for path in (folder / "checkpoints").iterdir()} == before
        assert main(arguments) == 0
        assert_same_bits(final_state(folder), final_state(plain))

    def test_it_holds_everything_under_plain_names(self, photo_folder: Path, tmp_path: Path) -> None:
        output = tmp_path / "run"
        assert main(flags(data=photo_folder, output=output, loader="torch", epochs=1)) == 0
        state = torch.load(output / "checkpoints" / f"step_{STEPS:07d}.pt", weights_only=True)
        assert {"step", "epoch", "config", "versions", "dataset", "geometry", "training"} <= state.keys()
        parts = state["training"]
        assert parts.keys() == {"method", "optimiser", "mmnn", "mmnn_optimiser", "classifier", "classifier_optimiser"}
        assert {"queue", "pointer", "head.0.weight", "key_head.0.weight"} <= parts["method"].keys()
        bare = timm.create_model("test_resnet", num_classes=0).state_dict()
        names = {f"{encoder}.{name}" for encoder in ("backbone", "key_backbone") for name in bare}
        assert names <= parts["method"].keys()
        assert all(part["state"] for name, part in parts.items() if "optimiser" in name)


class TestStrangers:
    """Checkpoints that are whole, and of something else."""

    @pytest.mark.parametrize(
        "edit",
        [
            lambda state: state.pop("config"),
            lambda state: state.update(training=[1, 2]),
            lambda state: state["training"].pop("optimiser"),
            lambda state: state["training"]["method"].update(queue=torch.zeros(3, 3)),
            lambda state: state["training"]["optimiser"].update(param_groups=[1, 2]),
        ],
    )
    def test_they_are_refused_in_one_line(self, copied: Path, photo_folder: Path, capsys: Capture, edit: Any) -> None:
        change(copied, 2, edit)
        (copied / "checkpoints" / "step_0000001.pt").unlink()
        assert main(again(copied, photo_folder)) == 2
        line = error(capsys)
        assert line.startswith(f"cocor-train: error: --resume {copied}/checkpoints/step_0000002.pt: ")
        assert "no checkpoint of a run" in line or "does not fit this run" in line

    def test_a_folder_that_is_no_run_is_left_alone(self, photo_folder: Path, tmp_path: Path, capsys: Capture) -> None:
        (tmp_path / "thesis.tex").write_text("years of work")
        assert main(again(tmp_path, photo_folder)) == 2
        assert f"--output {tmp_path} holds something, but no run" in capsys.readouterr().err
        assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


class TestOtherMachines:
    def test_machine_dependent_values_are_not_saved(
        self, plain: Path, photo_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked = load(["--config", str(plain / "config.yaml")])
        assert (asked.gpus, asked.workers, asked.precision) == (0, 1, "fp32")  # as the flags said
        assert "# 0 GPUs here, 1 thread a loader" in (plain / "config.yaml").read_text()
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        folder = tmp_path / "run"
        assert main(flags(data=photo_folder, output=folder, epochs=1, **PLAIN, workers=0, gpus=None)) == 0
        saved = ["--config", str(folder / "config.yaml")]
        assert (load(saved).gpus, load(saved).workers) == (None, 0)
        assert main([*saved, "--resume"]) == 0

    def test_the_weights_it_started_from_may_be_gone(self, plain: Path, photo_folder: Path, tmp_path: Path) -> None:
        folder, init = tmp_path / "run", tmp_path / "start.safetensors"
        shutil.copyfile(plain / "backbone.safetensors", init)
        assert main(flags(data=photo_folder, output=folder, **PLAIN, **EVERY_STEP, init=init)) == 0
        interrupted(folder, tmp_path / "again", step=2)
        init.unlink()
        assert main(again(tmp_path / "again", photo_folder, init=init)) == 0
        assert_same_bits(final_state(tmp_path / "again"), final_state(folder))


class TestTheSameCommandAgain:
    def test_it_begins_whatever_a_killed_start_left(self, photo_folder: Path, tmp_path: Path) -> None:
        folder = tmp_path / "run"
        (folder / "checkpoints").mkdir(parents=True)
        (folder / f".config.yaml.123{TEMPORARY}").write_text("ep")
        (folder / "log.txt").touch()
        arguments = again(folder, photo_folder, epochs=1, val_data=photo_folder)
        assert main(arguments) == 0
        assert "no checkpoint" in (folder / "log.txt").read_text() and not list(folder.glob(f".*{TEMPORARY}"))
        before = (folder / "metrics.jsonl").read_text()
        assert main(arguments) == 0 and (folder / "metrics.jsonl").read_text() == before
        (folder / "checkpoints" / f"step_{STEPS:07d}.pt").unlink()
        assert main(arguments) == 0  # and nothing is doubled without a checkpoint
        assert [row["step"] for row in metrics(folder, "knn")] == [0, STEPS]
        assert [row["step"] for row in metrics(folder, "train")] == list(range(1, STEPS + 1))

    def test_an_interrupted_knn_is_measured_on_resume(self, copied: Path, photo_folder: Path) -> None:
        change(copied, STEPS, lambda state: state.update(knn_is_due=True))
        assert main(again(copied, photo_folder, val_data=photo_folder)) == 0
        assert [row["step"] for row in metrics(copied, "knn")] == [STEPS, 2 * STEPS]

    def test_restarted_ranks_resume_always(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def going_on(*arguments: str) -> tuple[str | None, bool]:
            config = resuming_after_restart(load(["--output", str(tmp_path), "--gpus", "0", *arguments]))
            return config.resume, config.overwrite

        (tmp_path / "config.yaml").touch()
        assert going_on("--overwrite") == (None, True)
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
        assert going_on() == going_on("--overwrite") == going_on("--resume") == ("auto", False)
        assert going_on("--resume", "elsewhere.pt") == ("elsewhere.pt", True)  # which has not been saved here yet
        (tmp_path / "checkpoints").mkdir()
        (tmp_path / "checkpoints" / "step_best.pt").touch()  # a copy that somebody has put there
        assert going_on("--resume", "elsewhere.pt") == ("elsewhere.pt", True)
        (tmp_path / "checkpoints" / "step_0000001.pt").touch()
        assert going_on("--resume", "elsewhere.pt") == ("auto", False)
        monkeypatch.setenv("COCOR_STARTED", "1e12")  # later than what is there: it was to be overwritten
        assert going_on("--overwrite") == (None, True)
        (tmp_path / "config.yaml").unlink()
        assert going_on() == (None, False)


_HOLD = """
import sys, time
from pathlib import Path
from cocor import run_dir
lock = run_dir.lock_of(Path(sys.argv[1]))
run_dir.take(lock)
print("held", flush=True)
time.sleep(60)
"""


class TestFolderInUse:
    @pytest.fixture
    def holder(self, tmp_path: Path) -> Any:
        """Another process that writes to the run's folder."""
        command = [sys.executable, "-c", _HOLD, str(tmp_path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=runs.environment()) as process:
            assert process.stdout is not None and process.stdout.readline() == "held\n"
            yield process
            process.kill()

    def test_a_second_process_is_refused(self, holder: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(run_dir, "_PATIENCE", 0.3)
        with pytest.raises(UserError, match=f"{tmp_path} is written to by another process"):
            run_dir.take(run_dir.lock_of(tmp_path))

    def test_a_lock_comes_with_its_folder(self, plain: Path, tmp_path: Path, capsys: Capture) -> None:
        lock = run_dir.lock_of(tmp_path / "new")
        config = Config(data=tmp_path / "images", output=tmp_path / "new")
        run_dir.claim(config, lock)
        assert not list(tmp_path.iterdir())
        run_dir.prepare(config, config, [tmp_path / "images"], lock, resumes=False)
        assert lock.is_locked
        lock.release()
        assert main(flags(data=tmp_path / "gone", output=plain)) == 2  # before data is read
        assert f"--output {plain} holds an earlier run" in error(capsys)


@pytest.mark.gpu
@pytest.mark.parametrize("loader", ["dali", "torch"])
def test_gpu_resume_is_within_noise(photo_folder: Path, tmp_path: Path, loader: str) -> None:
    """In processes of their own: within one, two runs may well be equal to the bit."""
    options = {"data": photo_folder, "gpus": 1, "loader": loader, "log_samples": True, "execution": "eager"}
    for name in ("one", "two", "three"):
        if name == "three":
            interrupted(tmp_path / "one", tmp_path / name, step=2)
        done = runs.run(*flags(**options, **EVERY_STEP, output=tmp_path / name), "--resume")
        assert done.returncode == 0, done.stderr
    states = [runs.flat(final_state(tmp_path / name)) for name in ("one", "two", "three")]
    names = [name for name, value in states[0].items() if isinstance(value, Tensor) and value.is_floating_point()]
    whole, again, resumed = (torch.cat([state[name].flatten().double() for name in names]) for state in states)
    assert (resumed - whole).norm() <= 3 * (again - whole).norm() + 1e-6 * whole.norm()
    one, three = (metrics(tmp_path / name, "samples") for name in ("one", "three"))
    assert [row["index"] for row in one] == [row["index"] for row in three]


@pytest.mark.ffcv
def test_ffcv_goes_on_in_mid_epoch(photo_beton: Path, tmp_path: Path) -> None:
    pytest.importorskip("ffcv", reason="needs the ffcv extra", exc_type=ImportError)
    runs.assert_resumes(tmp_path, STEPS + 1, loader="ffcv", data=photo_beton, log_samples=True, **EVERY_STEP)


@pytest.mark.parametrize(
    "options",
    [
        {"log_samples": True}, {"method": "byol", "optimiser": "lars", "warmup_epochs": 0},
        {"method": "intl", "embedding_dim": 16, "warmup_epochs": 0}, {"method": "supcon"},
        {"backbone": "test_vit_relpos", "consistency": "none"},  # drops an eighth, of the same draws
    ],
    ids=str,
)  # fmt: skip
def test_every_method_goes_on_in_mid_epoch(tmp_path: Path, options: dict[str, Any]) -> None:
    """MoCo and SimSiam in test_train.py as well, with other loaders."""
    runs.assert_resumes(tmp_path, STEPS + 1, **SYNTHETIC, **options, **EVERY_STEP)
