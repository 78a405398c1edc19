"""Test whole runs of ``cocor-train``: what they leave, how they go on, and where they may write."""

import shutil
import signal
import time
from pathlib import Path

import pytest
import timm
import torch
from helpers import runs
from helpers.runs import STEPS, Capture, assert_same_bits, final_state, flags, interrupted, metrics
from PIL import Image
from safetensors.torch import load_file

from cocor.methods.moco import MoCo
from cocor.run import Run
from cocor.train import main

# With BatchNorm over 8 images differences in rounding grow tenfold a step at the usual rate, a hundredth of it keeps
# them below 1e-4 while a step still changes losses by 1e-2.
GENTLE = 3e-4
SHORT = {"epochs": 1, "loader": "torch", "consistency": "none"}


def assert_same_losses(one: Path, other: Path) -> None:
    """Of all steps of two runs at the learning rate :data:`GENTLE`."""
    names = ["step", "loss", "labelled_loss", "similarity_3"]
    left, right = metrics(one, "train"), metrics(other, "train")
    assert len(left) == len(right) == 2 * STEPS
    for first, second in zip(left, right, strict=True):
        expected = pytest.approx([first[name] for name in names], rel=1e-3, abs=1e-3)
        assert [second[name] for name in names] == expected


def test_epochs_share_one_stream_of_batches(
    photo_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = []
    make = Run._pairs
    monkeypatch.setattr(Run, "_pairs", lambda *given: opened.append(given[1:]) or make(*given))
    assert main(flags(**SHORT | {"epochs": 3}, data=photo_folder, knn_every=0, output=tmp_path / "run")) == 0
    assert opened == [(0, 0)]


class TestRunFolder:
    def test_it_holds_what_the_documentation_says(self, unbroken: Path) -> None:
        names = {"config.yaml", "log.txt", "metrics.jsonl", "checkpoints", "backbone.safetensors", ".lock"}
        names |= {"views.png", "plot.png"}
        assert {path.name for path in unbroken.iterdir()} == names
        with Image.open(unbroken / "views.png") as sheet:
            assert sheet.width > 6 * 144  # original, two views, three composites
        assert "k-NN accuracy after 2 epochs" in (unbroken / "log.txt").read_text()

    def test_metrics_tell_of_every_part(self, unbroken: Path) -> None:
        lines, weight = metrics(unbroken, "train"), MoCo.defaults["consistency_weight"]
        assert [line["step"] for line in lines] == list(range(1, 2 * STEPS + 1))
        assert [line["epoch"] for line in lines] == [0] * STEPS + [1] * STEPS
        told = {"loss", "lr", "images_per_s", "data_wait_share", "time_left_s", "contrastive_loss", "consistency_loss"}
        told |= {"contrastive_feature_std", "labelled_loss", "labelled_accuracy", "hypergradient_norm"}
        told |= {f"{what}_{length}" for what in ("similarity", "target") for length in (1, 2, 3)}
        for line in lines:
            assert told <= line.keys() and None not in line.values()
            consistency = weight * line["consistency_loss"]
            assert line["loss"] == pytest.approx(line["contrastive_loss"] + consistency, rel=1e-5)
        assert [(line["step"], line["epoch"]) for line in metrics(unbroken, "knn")] == [(0, 0), (STEPS, 1), (6, 2)]

    def test_the_backbone_is_timms(self, unbroken: Path) -> None:
        exported = unbroken / "backbone.safetensors"
        model = timm.create_model("test_resnet", num_classes=0, checkpoint_path=str(exported))
        trained = final_state(unbroken)["method"]
        for name, value in model.state_dict().items():
            assert torch.equal(value, trained[f"backbone.{name}"])

    def test_a_run_starts_from_the_weights_of_another(self, unbroken: Path, photo_folder: Path, tmp_path: Path) -> None:
        options = {"data": photo_folder, "init": unbroken, "consistency": "none"}
        assert main(flags(**options, output=tmp_path / "run", epochs=1, lr=0, weight_decay=0, loader="torch")) == 0
        backbone = load_file(tmp_path / "run" / "backbone.safetensors")
        for name, value in load_file(unbroken / "backbone.safetensors").items():
            assert "running" in name or "tracked" in name or torch.equal(backbone[name], value)

    def test_the_saved_configuration_repeats_the_run(self, unbroken: Path, tmp_path: Path) -> None:
        assert main(["--config", str(unbroken / "config.yaml"), "--output", str(tmp_path / "again")]) == 0
        assert_same_bits(final_state(tmp_path / "again"), final_state(unbroken))


class TestResume:
    @pytest.mark.parametrize("step", [1, STEPS, STEPS + 2])
    def test_a_run_goes_on_bit_for_bit(self, unbroken: Path, photo_folder: Path, tmp_path: Path, step: int) -> None:
        folder = tmp_path / "run"
        interrupted(unbroken, folder, step)
        assert main([*flags(data=photo_folder, val_data=photo_folder, output=folder), "--resume"]) == 0
        assert_same_bits(final_state(folder), final_state(unbroken))
        for kind, numbers in (("train", ["step", "loss", "lr"]), ("knn", ["step", "accuracy"])):
            rows, expected = ([[line[n] for n in numbers] for line in metrics(f, kind)] for f in (folder, unbroken))
            assert rows == expected
        log = (folder / "log.txt").read_text()
        assert f"going on from {folder}/checkpoints/step_{step:07d}.pt: {step} of 6 steps done" in log

    def test_simsiam_resumes_with_the_torch_loader(self, photo_folder: Path, tmp_path: Path) -> None:
        options = {"method": "simsiam", "loader": "torch", "recipe": "released", "released_originals": 2}
        runs.assert_resumes(tmp_path, STEPS + 1, **options, consistency="abs", data=photo_folder, **runs.EVERY_STEP)

    def test_a_killed_process_keeps_what_was_saved(self, unbroken: Path, photo_folder: Path, tmp_path: Path) -> None:
        folder = tmp_path / "run"
        arguments = flags(data=photo_folder, val_data=photo_folder, output=folder, checkpoint_every_minutes=1e-9)
        with runs.start(*arguments) as process:
            deadline = time.monotonic() + 300
            while not list(folder.glob("checkpoints/step_*.pt")) and time.monotonic() < deadline:
                time.sleep(0.005)
            process.send_signal(signal.SIGKILL)
        assert process.returncode == -signal.SIGKILL
        assert main([*arguments, "--resume"]) == 0
        assert_same_bits(final_state(folder), final_state(unbroken))
        assert [line["step"] for line in metrics(folder, "train")] == list(range(1, 2 * STEPS + 1))

    def test_resume_from_elsewhere_and_at_the_end(self, unbroken: Path, photo_folder: Path, tmp_path: Path) -> None:
        saved, folder = unbroken / "checkpoints" / "step_0000004.pt", tmp_path / "new"
        assert main(flags(data=photo_folder, val_data=photo_folder, output=folder, resume=saved)) == 0
        assert (folder / "views.png").is_file()
        before = (folder / "metrics.jsonl").read_text()
        assert main([*flags(data=photo_folder, val_data=photo_folder, output=folder), "--resume"]) == 0
        assert (folder / "metrics.jsonl").read_text() == before
        assert_same_bits(final_state(folder), final_state(unbroken))


class TestOutput:
    """Nothing is overwritten, mixed up or left half-made."""

    @pytest.fixture
    def files(self, unbroken: Path, tmp_path: Path) -> Path:
        """A copy of a run."""
        return Path(shutil.copytree(unbroken, tmp_path / "run"))

    def refused(self, capsys: Capture, *arguments: str, **options: object) -> str:
        capsys.readouterr()
        assert main([*flags(**options), *arguments]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        return line

    def test_a_folder_in_use_is_left_alone(
        self, files: Path, unbroken: Path, photo_folder: Path, capsys: Capture
    ) -> None:
        def times() -> list[tuple[Path, int]]:
            return sorted((path, path.stat().st_mtime_ns) for path in files.rglob("*") if path.name != ".lock")

        before = times()
        line = self.refused(capsys, data=photo_folder, output=files)
        assert str(files) in line and "--resume" in line and "--overwrite" in line
        line = self.refused(capsys, "--resume", data=photo_folder, output=files, temperature=0.5)
        assert "temperature: 0.2 in the checkpoint, 0.5 now" in line
        line = self.refused(capsys, "--resume", data=photo_folder, output=files, epochs=400)
        assert "epochs: 2 in the checkpoint, 400 now; to train on, start a new run" in line and "--init RUN" in line
        saved = unbroken / "checkpoints" / "step_0000004.pt"
        assert "another run" in self.refused(capsys, data=photo_folder, output=files, resume=saved)
        assert times() == before

    def test_overwrite_replaces_nothing_but_a_run(
        self, files: Path, photo_folder: Path, tmp_path: Path, capsys: Capture
    ) -> None:
        (files / "checkpoints" / "step_0000099.pt").touch()
        assert main([*flags(data=photo_folder, **SHORT, output=files), "--overwrite"]) == 0
        assert [path.name for path in (files / "checkpoints").iterdir()] == ["step_0000003.pt"]
        home, project = tmp_path / "home", tmp_path / "project"
        for folder in (home, project, files):
            folder.mkdir(exist_ok=True)
            (folder / "thesis.tex").write_text("years of work")
        (project / "config.yaml").write_text("name: of another program")
        usual = {"data": photo_folder, **SHORT}
        line = self.refused(capsys, "--overwrite", **usual, output=home)
        assert str(home) in line and "choose another --output" in line
        assert "holds something, but no run" in self.refused(capsys, "--overwrite", **usual, output=project)
        assert "thesis.tex" in self.refused(capsys, "--overwrite", **usual, output=files)
        assert "is a file" in self.refused(capsys, **usual, output=files / "thesis.tex")
        assert [path.name for path in home.iterdir()] == ["thesis.tex"]
        assert (files / "checkpoints").is_dir() and (project / "thesis.tex").exists()

    def test_overwrite_spares_what_it_starts_from(self, files: Path, photo_folder: Path, capsys: Capture) -> None:
        for key in ("init", "labels", "label_split"):
            options = {"data": photo_folder, "output": files, key: files / "backbone.safetensors"}
            line = self.refused(capsys, "--overwrite", **options)
            assert f"--{key.replace('_', '-')} {files}/backbone.safetensors is in --output {files}" in line
        assert (files / "backbone.safetensors").is_file() and (files / "checkpoints").is_dir()

    def test_a_diverged_run_ends_in_one_line(self, photo_folder: Path, tmp_path: Path, capsys: Capture) -> None:
        knn = {"val_data": photo_folder, "knn_every": 1, "lr": 1e25, "output": tmp_path / "knn"}
        assert main(flags(data=photo_folder, **SHORT, **knn)) == 2
        assert "--lr" in capsys.readouterr().err.splitlines()[-1]
        options = SHORT | {"method": "simsiam", "lr": 1e30, "log_every": 100, "epochs": 2}
        assert main(flags(data=photo_folder, **options, output=tmp_path / "run")) == 2
        assert "not finite at step 2: lower --lr" in capsys.readouterr().err.splitlines()[-1]
        assert not list((tmp_path / "run" / "checkpoints").iterdir())

    def test_a_mistake_leaves_no_folder_behind(
        self, unbroken: Path, photo_folder: Path, photo_copy: Path, tmp_path: Path, capsys: Capture
    ) -> None:
        for options, words in (
            ({"resume": tmp_path / "gone.pt"}, "gone.pt"),
            ({"resume": unbroken, "temperature": 0.5}, "temperature"),
            ({"init": photo_folder / "astronaut" / "0.jpg"}, "0.jpg"),
            ({"output": photo_folder / "runs" / "one"}, "overlap"),
            ({**SHORT, "knn_every": 1, "val_data": photo_copy, "output": photo_copy / "run"}, "overlap"),
        ):
            assert words in self.refused(capsys, **{"data": photo_folder, "output": tmp_path / "new"} | options)
        assert not any(path.exists() for path in (tmp_path / "new", photo_folder / "runs", photo_copy / "run"))


def test_dry_run_writes_nothing(photo_folder: Path, tmp_path: Path, capsys: Capture) -> None:
    before = sorted(photo_folder.rglob("*"))
    assert main([*flags(data=photo_folder, output=tmp_path / "run"), "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert "temperature: 0.2" in printed  # the resolved configuration
    assert "views: (2, 8, 3, 32, 32) float32 cpu" in printed and "composition: (3, 8, 14) uint8 cpu" in printed
    assert "loss after 2 steps: " in printed and "memory: " in printed and "6 steps, about" in printed
    assert not list(tmp_path.iterdir()) and sorted(photo_folder.rglob("*")) == before


class TestRanks:
    @pytest.mark.gpu
    @pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
    @pytest.mark.parametrize("execution", ["eager", "graph"])
    @pytest.mark.parametrize("options", [{"backbone": "test_nfnet"}, {"method": "simsiam", "sync_bn": True}])
    def test_two_gpus_make_one_run(self, photo_folder: Path, tmp_path: Path, options: dict, execution: str) -> None:
        """Over NCCL. Without TF32, whose rounding depends on the batch that a GPU gets."""
        common = {"data": photo_folder, "loader": "torch", "precision": "fp32", "execution": execution, **options}
        for gpus in (1, 2):
            chosen = flags(**common, lr=GENTLE, output=tmp_path / str(gpus), gpus=gpus)
            done = runs.run(*chosen, NVIDIA_TF32_OVERRIDE="0")
            assert done.returncode == 0, done.stderr
        assert_same_losses(tmp_path / "1", tmp_path / "2")
