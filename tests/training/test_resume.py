"""Where a run may go on, and where not: other ranks, other images, damaged files, a folder in use, half a start."""

import json
import multiprocessing
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from helpers.runs import (
    STEPS,
    assert_same_bits,
    command,
    environment,
    final_state,
    flags,
    flat,
    interrupted,
    metrics,
    run,
)
from torch import Tensor

from cocor import checkpoint, run_dir
from cocor.config.options import Config
from cocor.config.resolve import load
from cocor.train import main, resuming_after_restart
from loaders.errors import UserError
from loaders.files import TEMPORARY

EVERY_STEP = {"checkpoint_every_minutes": 1e-9}
PLAIN = {"consistency": "none", "loader": "torch"}


@pytest.fixture(scope="module")
def without_norm(photo_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two epochs of a network without BatchNorm on one rank. Read only, do not change."""
    folder = tmp_path_factory.mktemp("runs") / "one"
    options = {"data": photo_folder, "backbone": "test_nfnet", "loader": "dali", "log_samples": True}
    assert main(flags(**options, **EVERY_STEP, output=folder)) == 0
    return folder


@pytest.fixture(scope="module")
def plain(photo_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two epochs of plain MoCo. Read only, do not change."""
    folder = tmp_path_factory.mktemp("runs") / "plain"
    assert main(flags(data=photo_folder, output=folder, **PLAIN, **EVERY_STEP)) == 0
    return folder


def change(folder: Path, step: int, edit: Callable[[dict[str, Any]], None]) -> None:
    """Edit the checkpoint of ``step``, which becomes the newest."""
    for path in (folder / "checkpoints").iterdir():
        if int(path.stem.removeprefix("step_")) > step:
            path.unlink()
    state = checkpoint.load(folder / "checkpoints" / f"step_{step:07d}.pt")
    edit(state)
    checkpoint.save(folder / "checkpoints", state, keep=100)


class TestOtherRanks:
    def test_two_ranks_resume_the_run_of_one(self, without_norm: Path, photo_folder: Path, tmp_path: Path) -> None:
        folder = tmp_path / "run"
        interrupted(without_norm, folder, step=2)
        options = {"data": photo_folder, "backbone": "test_nfnet", "loader": "dali", "log_samples": True}
        two = run(*flags(**options, **EVERY_STEP, output=folder, cpu_ranks=2), "--resume")
        assert two.returncode == 0, two.stderr
        assert "other ranks, the same batches and steps: 1 ranks, 8 images a rank" in two.stderr
        left, right = flat(final_state(without_norm)), flat(final_state(folder))
        for name, value in left.items():
            if isinstance(value, Tensor):
                torch.testing.assert_close(right[name], value, rtol=1e-3, atol=1e-5, msg=name)
        for one, other in zip(metrics(without_norm, "samples"), metrics(folder, "samples"), strict=True):
            assert (one["step"], one["index"]) == (other["step"], other["index"])
        interrupted(folder, tmp_path / "back", step=4)
        assert main([*flags(**options, output=tmp_path / "back"), "--resume"]) == 0  # one again
        assert metrics(tmp_path / "back", "samples")[-1]["index"] == metrics(without_norm, "samples")[-1]["index"]
        for one, other in zip(metrics(without_norm, "train"), metrics(folder, "train"), strict=True):
            assert one["lr"] == other["lr"] and other["loss"] == pytest.approx(one["loss"], rel=1e-3)

    def test_other_batchnorm_batches_need_force_ranks(
        self, plain: Path, photo_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        folder = Path(shutil.copytree(plain, tmp_path / "run"))
        ranks = {"ranks": 2, "images a rank": 4, "images to a BatchNorm": 4, "BatchNorm groups of keys": 2}
        change(folder, 2, lambda state: state.update(geometry=ranks))  # as two ranks would have saved it
        arguments = [*flags(data=photo_folder, output=folder, **PLAIN), "--resume"]
        assert main(arguments) == 2
        line = capsys.readouterr().err.splitlines()[-1]
        assert "2 ranks, 4 images a rank, 4 images to a BatchNorm, 2 BatchNorm groups of keys in the checkpoint" in line
        assert "1 ranks, 8 images a rank, 8 images to a BatchNorm" in line and "--force-ranks" in line
        assert main([*arguments, "--force-ranks"]) == 0
        assert "as asked (--force-ranks)" in (folder / "log.txt").read_text() + capsys.readouterr().err
        assert "force_ranks" not in (folder / "config.yaml").read_text()


class TestOtherImages:
    def test_they_are_refused_or_asked_for(
        self, plain: Path, photo_copy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        folder = Path(shutil.copytree(plain, tmp_path / "run"))
        (folder / "checkpoints" / "step_0000006.pt").unlink()
        (photo_copy / "coffee" / "0.jpg").rename(photo_copy / "coffee" / "new.jpg")
        arguments = [*flags(data=photo_copy, output=folder, **PLAIN), "--resume"]
        assert main(arguments) == 2
        line = capsys.readouterr().err.splitlines()[-1]
        assert "data: other images" in line and "--force-data goes on with them" in line
        assert main([*arguments, "--force-data"]) == 0
        assert "other images than in the checkpoint" in capsys.readouterr().err
        assert [row["step"] for row in metrics(folder, "train")] == list(range(1, 2 * STEPS + 1))


class TestCheckpoints:
    def test_a_truncated_newest_falls_back_to_the_previous(
        self, plain: Path, photo_folder: Path, tmp_path: Path
    ) -> None:
        folder = Path(shutil.copytree(plain, tmp_path / "run"))
        newest = folder / "checkpoints" / "step_0000006.pt"
        newest.write_bytes(newest.read_bytes()[:-100])
        assert main([*flags(data=photo_folder, output=folder, **PLAIN), "--resume"]) == 0
        assert f"going on from {folder}/checkpoints/step_0000005.pt" in (folder / "log.txt").read_text()
        assert_same_bits(final_state(folder), final_state(plain))

    def test_one_that_does_not_fit_is_named(
        self, plain: Path, photo_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        folder = Path(shutil.copytree(plain, tmp_path / "run"))
        change(folder, 3, lambda state: state["training"]["method"].update(queue=torch.zeros(3, 3)))
        assert main([*flags(data=photo_folder, output=folder, **PLAIN), "--resume"]) == 2
        line = capsys.readouterr().err.splitlines()[-1]
        assert "does not fit this run: size mismatch for queue" in line

    def test_milestones_stay(self, photo_folder: Path, tmp_path: Path) -> None:
        options = {"epochs": 3, "keep_checkpoints": 1, "keep_every_epochs": 2, "checkpoint_every_epochs": 3}
        assert main(flags(data=photo_folder, output=tmp_path / "run", **PLAIN, **options)) == 0
        found = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
        assert found == [f"step_{2 * STEPS:07d}.pt", f"step_{3 * STEPS:07d}.pt"]

    def test_a_full_disk_keeps_old_checkpoints_and_training(
        self, plain: Path, photo_folder: Path, tmp_path: Path
    ) -> None:
        """By a limit on the size of files."""
        folder = tmp_path / "run"
        interrupted(plain, folder, step=2)
        before = {path: path.read_bytes() for path in (folder / "checkpoints").iterdir()}
        arguments = [*flags(data=photo_folder, output=folder, **PLAIN, **EVERY_STEP), "--resume"]
        shell = ["bash", "-c", 'ulimit -f 1000; exec "$@"', "bash", *command(*arguments)]  # KiB
        done = subprocess.run(shell, env=environment(), capture_output=True, text=True, check=False, timeout=300)
        errors = [line for line in done.stderr.splitlines() if "cannot write" in line]
        assert done.returncode == 2 and "no checkpoint of step 3; training goes on, older ones are kept" in errors[0]
        assert errors[-1].startswith("cocor-train: error: cannot write step_0000006.pt")
        assert {path: path.read_bytes() for path in (folder / "checkpoints").iterdir()} == before
        assert main(arguments) == 0
        assert_same_bits(final_state(folder), final_state(plain))

    def test_it_holds_everything_under_plain_names(self, photo_folder: Path, tmp_path: Path) -> None:
        output = tmp_path / "run"
        assert main(flags(data=photo_folder, output=output, loader="torch", epochs=1)) == 0
        program = (
            "import json, sys, torch; state = torch.load(sys.argv[1], weights_only=True); training = state['training'];"
            "assert not any(name.startswith(('cocor', 'loaders')) for name in sys.modules);"
            "json.dump([sorted(state), sorted(training), sorted(training['method']), "
            "{name: len(part['state']) for name, part in training.items() if 'optimiser' in name}], sys.stdout)"
        )
        file = output / "checkpoints" / f"step_{STEPS:07d}.pt"
        call = [sys.executable, "-c", program, str(file)]
        done = subprocess.run(call, capture_output=True, text=True, cwd="/", check=False, timeout=300)
        assert done.returncode == 0, done.stderr
        top, parts, names, moments = json.loads(done.stdout)
        assert {"step", "epoch", "config", "versions", "dataset", "geometry", "training"} <= set(top)
        assert {"method", "optimiser", "mmnn", "mmnn_optimiser", "classifier", "classifier_optimiser"} == set(parts)
        assert {"queue", "pointer", "head.0.weight", "key_head.0.weight"} <= set(names)
        bare = timm.create_model("test_resnet", num_classes=0).state_dict()
        assert {f"{encoder}.{name}" for encoder in ("backbone", "key_backbone") for name in bare} <= set(names)
        assert min(moments.values()) > 0


class TestStrangers:
    """Checkpoints that are whole, and of something else."""

    @pytest.mark.parametrize(
        "edit",
        [
            lambda state: state.pop("config"),
            lambda state: state.pop("training"),
            lambda state: state.update(training=[1, 2]),
            lambda state: state.update(dataset=None),
            lambda state: state.update(geometry=7),
            lambda state: state["training"].pop("optimiser"),
            lambda state: state["training"].update(method=None),
            lambda state: state["training"].update(optimiser={}),
            lambda state: state["training"]["optimiser"].update(param_groups=[1, 2]),
        ],
    )
    def test_they_are_refused_in_one_line(
        self,
        plain: Path,
        photo_folder: Path,
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
        edit: Callable[[dict[str, Any]], None],
    ) -> None:
        folder = tmp_path / "run"
        shutil.copytree(plain, folder, ignore=shutil.ignore_patterns("step_0000001.pt", "step_000000[3-6].pt"))
        change(folder, 2, edit)
        assert main([*flags(data=photo_folder, output=folder, **PLAIN), "--resume"]) == 2
        line = capsys.readouterr().err.splitlines()[-1]
        assert line.startswith(f"cocor-train: error: --resume {folder}/checkpoints/step_0000002.pt: ")
        assert "no checkpoint of a run" in line or "does not fit this run" in line

    def test_a_folder_that_is_no_run_is_left_alone(
        self, photo_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (tmp_path / "thesis.tex").write_text("years of work")
        assert main([*flags(data=photo_folder, output=tmp_path, **PLAIN), "--resume"]) == 2
        assert f"--output {tmp_path} holds something, but no run" in capsys.readouterr().err
        assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


class TestOtherMachines:
    def test_saved_config_omits_machine_dependent_values(self, plain: Path) -> None:
        text = (plain / "config.yaml").read_text()
        asked = load(["--config", str(plain / "config.yaml")])
        assert (asked.gpus, asked.workers, asked.precision) == (0, 1, "fp32")  # as the flags said
        assert "# no GPUs here, 1 threads a loader" in text

    def test_it_leaves_gpus_and_threads_to_the_machine(
        self, plain: Path, photo_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        folder = tmp_path / "run"
        assert main(flags(data=photo_folder, output=folder, epochs=1, **PLAIN, workers=0, gpus=None)) == 0
        saved = ["--config", str(folder / "config.yaml")]
        assert (load(saved).gpus, load(saved).workers) == (None, 0)
        assert main([*saved, "--resume"]) == 0

    def test_the_weights_it_started_from_may_be_gone(self, plain: Path, photo_folder: Path, tmp_path: Path) -> None:
        folder, init = tmp_path / "run", tmp_path / "start.safetensors"
        shutil.copyfile(plain / "backbone.safetensors", init)
        arguments = flags(data=photo_folder, output=folder, **PLAIN, **EVERY_STEP, init=init)
        assert main(arguments) == 0
        interrupted(folder, tmp_path / "again", step=2)
        init.unlink()
        again = flags(data=photo_folder, output=tmp_path / "again", **PLAIN, init=init)
        assert main([*again, "--resume"]) == 0
        assert_same_bits(final_state(tmp_path / "again"), final_state(folder))


class TestTheSameCommandAgain:
    def test_whatever_a_killed_start_left_it_begins(self, photo_folder: Path, tmp_path: Path) -> None:
        folder = tmp_path / "run"
        (folder / "checkpoints").mkdir(parents=True)
        (folder / f".config.yaml.123{TEMPORARY}").write_text("ep")
        (folder / "log.txt").touch()
        arguments = [*flags(data=photo_folder, output=folder, **PLAIN, epochs=1), "--resume"]
        assert main(arguments) == 0
        assert not list(folder.glob(f".*{TEMPORARY}"))
        before = (folder / "metrics.jsonl").read_text()
        assert main(arguments) == 0 and (folder / "metrics.jsonl").read_text() == before

    def test_without_a_checkpoint_nothing_is_doubled(self, photo_folder: Path, tmp_path: Path) -> None:
        folder = tmp_path / "run"
        arguments = [*flags(data=photo_folder, val_data=photo_folder, output=folder, **PLAIN, epochs=1), "--resume"]
        assert main(arguments) == 0
        (folder / "checkpoints" / f"step_{STEPS:07d}.pt").unlink()
        assert main(arguments) == 0
        assert [row["step"] for row in metrics(folder, "knn")] == [0, STEPS]
        assert [row["step"] for row in metrics(folder, "train")] == list(range(1, STEPS + 1))

    def test_an_interrupted_knn_is_measured_on_resume(self, plain: Path, photo_folder: Path, tmp_path: Path) -> None:
        folder = Path(shutil.copytree(plain, tmp_path / "run"))
        change(folder, STEPS, lambda state: state.update(knn_is_due=True))
        assert main([*flags(data=photo_folder, val_data=photo_folder, output=folder, **PLAIN), "--resume"]) == 0
        assert [row["step"] for row in metrics(folder, "knn")] == [STEPS, 2 * STEPS]

    def test_a_restarted_rank_resumes_despite_its_flags(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment()) as process:
            assert process.stdout is not None and process.stdout.readline() == "held\n"
            yield process
            process.kill()

    def test_a_second_process_is_refused(
        self, holder: "subprocess.Popen[str]", tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(run_dir, "_PATIENCE", 0.3)
        with pytest.raises(UserError, match=f"{tmp_path} is written to by another process"):
            run_dir.take(run_dir.lock_of(tmp_path))

    def test_one_that_is_dying_is_waited_for(self, holder: "subprocess.Popen[str]", tmp_path: Path) -> None:
        threading.Timer(0.5, holder.kill).start()
        lock = run_dir.lock_of(tmp_path)
        run_dir.take(lock)
        assert holder.wait() != 0
        run_dir.take(lock)  # holds it already
        lock.release()

    def test_a_data_worker_does_not_keep_it(self, tmp_path: Path) -> None:
        lock = run_dir.lock_of(tmp_path)
        run_dir.take(lock)
        worker = multiprocessing.get_context("fork").Process(target=threading.Event().wait, args=(30,))
        worker.start()
        lock.release()
        other = run_dir.lock_of(tmp_path)
        run_dir.take(other)
        other.release()
        worker.kill()
        worker.join()

    def test_there_is_none_before_there_is_a_folder(self, tmp_path: Path) -> None:
        lock = run_dir.lock_of(tmp_path / "new")
        config = Config(data=tmp_path / "images", output=tmp_path / "new")
        run_dir.claim(config, lock)
        assert not list(tmp_path.iterdir())
        run_dir.prepare(config, config, [tmp_path / "images"], lock, resumes=False)
        assert lock.is_locked
        lock.release()

    def test_a_new_run_is_refused_before_data_is_read(
        self, plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(flags(data=tmp_path / "gone", output=plain)) == 2
        assert f"--output {plain} is in use" in capsys.readouterr().err.splitlines()[-1]

    @pytest.mark.parametrize("how", ["--resume", "--overwrite"])
    def test_two_starts_at_once_make_one_run(self, tmp_path: Path, how: str) -> None:
        folder = tmp_path / "run"
        options = PLAIN | EVERY_STEP | {"loader": "synthetic", "synthetic_images": 24}
        arguments = [*flags(output=folder, **options, log_samples=True), how]
        starts = [
            subprocess.Popen(command(*arguments), env=environment(), stderr=subprocess.PIPE, text=True)
            for _ in range(2)
        ]
        ends = [(start.communicate(timeout=300)[1], start.returncode) for start in starts]
        assert 0 in [code for _, code in ends], ends
        for error, code in ends:
            last = error.splitlines()[-1]
            refused = last.startswith(f"cocor-train: error: --output {folder}") and code == 2
            assert code == 0 or refused, ends
        steps = [line["step"] for line in metrics(folder, "samples")]
        assert steps == list(range(1, 2 * STEPS + 1))
        assert sorted(checkpoint.load(path)["step"] for path in (folder / "checkpoints").iterdir()) == steps

    def test_a_run_begun_meanwhile_is_not_begun_again(self, tmp_path: Path) -> None:
        """Neither had found a checkpoint when it looked."""
        folder, lock = tmp_path / "run", run_dir.lock_of(tmp_path / "run")
        config = Config(data=tmp_path / "images", output=folder, resume="auto")
        run_dir.prepare(config, config, [], lock, resumes=False)
        checkpoint.save(folder / "checkpoints", {"step": 3}, keep=1)
        lock.release()
        with pytest.raises(UserError, match="another process has begun this run meanwhile; start the command again"):
            run_dir.prepare(config, config, [], lock, resumes=False)
        run_dir.prepare(config, config, [], lock, resumes=True)
        lock.release()


def test_the_log_of_samples_is_json_of_whole_batches(without_norm: Path) -> None:
    rows = [json.loads(line) for line in (without_norm / "metrics.jsonl").read_text().splitlines()]
    for epoch in (0, 1):
        seen = [index for row in rows if row["kind"] == "samples" and row["epoch"] == epoch for index in row["index"]]
        assert sorted(seen) == list(range(24))


@pytest.mark.gpu
@pytest.mark.parametrize("loader", ["dali", "torch"])
def test_gpu_resume_is_within_run_to_run_noise(photo_folder: Path, tmp_path: Path, loader: str) -> None:
    options = {"data": photo_folder, "gpus": 1, "loader": loader, "log_samples": True}
    for name in ("one", "two"):
        assert main(flags(**options, **EVERY_STEP, output=tmp_path / name)) == 0
    interrupted(tmp_path / "one", tmp_path / "three", step=2)
    assert main([*flags(**options, output=tmp_path / "three"), "--resume"]) == 0
    states = [flat(final_state(tmp_path / name)) for name in ("one", "two", "three")]
    names = [name for name, value in states[0].items() if isinstance(value, Tensor) and value.is_floating_point()]
    whole, again, resumed = (torch.cat([state[name].flatten().double() for name in names]) for state in states)
    # Within one process two runs may well be equal to the bit. A resumed one asks DALI for other batches, which it
    # shares out among its decoders in another way, a quarter of a grey level apart. `tests/soak`
    # compares runs in processes of their own.
    assert (resumed - whole).norm() <= 3 * (again - whole).norm() + 0.05 * whole.norm()
    one, three = (metrics(tmp_path / name, "samples") for name in ("one", "three"))
    assert [row["index"] for row in one] == [row["index"] for row in three]


@pytest.mark.parametrize("loader", ["synthetic", pytest.param("ffcv", marks=pytest.mark.ffcv)])
def test_other_loaders_go_on_in_mid_epoch_as_well(photo_beton: Path, tmp_path: Path, loader: str) -> None:
    """As DALI and PyTorch's do in runs.py."""
    if loader == "ffcv":
        pytest.importorskip("ffcv", reason="needs the ffcv extra", exc_type=ImportError)
    images = {"synthetic_images": 24} if loader == "synthetic" else {"data": photo_beton}
    options = {"loader": loader, "log_samples": True, **images}
    assert main(flags(**options, **EVERY_STEP, output=tmp_path / "whole")) == 0
    interrupted(tmp_path / "whole", tmp_path / "run", step=STEPS + 1)
    assert main([*flags(**options, output=tmp_path / "run"), "--resume"]) == 0
    assert_same_bits(final_state(tmp_path / "run"), final_state(tmp_path / "whole"))
    rows, expected = metrics(tmp_path / "run", "samples"), metrics(tmp_path / "whole", "samples")
    assert [row["index"] for row in rows] == [row["index"] for row in expected]


def test_a_run_killed_while_writing_resumes(tmp_path: Path) -> None:
    """Killed while it makes its folder, locks it, syncs or renames a checkpoint, removes an old one."""
    options = PLAIN | EVERY_STEP | {"loader": "synthetic", "synthetic_images": 24, "keep_checkpoints": 2}
    moments = ["0.04", "0.1", "0.35", "0.6", "1"]
    call = [
        sys.executable,
        "-m",
        "helpers.kill_points",
        *moments,
        "--",
        str(tmp_path),
        *flags(**options, log_samples=True),
    ]
    paths = {"PYTHONPATH": f"{Path(__file__).parents[1]}:{environment()['PYTHONPATH']}"}
    done = subprocess.run(call, env=environment() | paths, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) == len(moments) and all(code == 0 for _, _, code in rows), (rows, done.stderr)
    for moment, where, _ in rows:
        folder = tmp_path / str(moment)
        assert_same_bits(final_state(folder), final_state(tmp_path / "whole"))
        assert [line["step"] for line in metrics(folder, "samples")] == list(range(1, 2 * STEPS + 1)), where
        assert not list(folder.rglob(f".*{TEMPORARY}")), where


def test_dropout_goes_on_with_the_same_draws(tmp_path: Path) -> None:
    """On a network that drops an eighth."""
    options = {"backbone": "test_vit_relpos", "loader": "synthetic", "synthetic_images": 24, "consistency": "none"}
    assert main(flags(**options, **EVERY_STEP, output=tmp_path / "whole")) == 0
    interrupted(tmp_path / "whole", tmp_path / "run", step=STEPS + 1)
    assert main([*flags(**options, output=tmp_path / "run"), "--resume"]) == 0
    assert_same_bits(final_state(tmp_path / "run"), final_state(tmp_path / "whole"))


@pytest.mark.parametrize(
    "method", [{"method": "byol", "optimiser": "lars"}, {"method": "intl", "embedding_dim": 16}, {"method": "supcon"}]
)
def test_every_method_goes_on_in_mid_epoch(tmp_path: Path, method: dict[str, Any]) -> None:
    """MoCo and SimSiam in runs.py."""
    options = {"loader": "synthetic", "synthetic_images": 24, "warmup_epochs": 0} | method
    assert main(flags(**options, **EVERY_STEP, output=tmp_path / "whole")) == 0
    interrupted(tmp_path / "whole", tmp_path / "run", step=STEPS + 1)
    assert main([*flags(**options, output=tmp_path / "run"), "--resume"]) == 0
    assert_same_bits(final_state(tmp_path / "run"), final_state(tmp_path / "whole"))
