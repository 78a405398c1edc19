"""``benchmarks/evidence.py`` with real, tiny trainings; its arithmetic with numbers made up."""

import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import evidence  # noqa: E402
from evidence_flags import shared_flags  # noqa: E402
from evidence_report import Measured, Row, gains, spread, table  # noqa: E402
from evidence_runs import Crew, Training  # noqa: E402
from evidence_studies import STUDIES, Variant  # noqa: E402

from cocor.config.resolve import load  # noqa: E402
from loaders.errors import UserError  # noqa: E402

TINY = ["--backbone", "test_resnet", "--stem", "imagenet", "--image-size=32", "--loader", "torch", "--workers", "1"]
TINY += ["--batch-size", "8", "--queue-size", "16", "--key-bn-splits", "2", "--log-every", "1", "--knn-k", "3"]


def command(data: Path, output: Path, *more: str, flags: list[str] | None = None) -> list[str]:
    where = ["--data", str(data), "--val-data", str(data), "--output", str(output)]
    which = ["--study", "core", "--methods", "moco", "--only", "plain", "cocor", "--seeds", "0", "--epochs", "2"]
    return [*which, *where, "--gpus", "0", "--jobs", "2", *more, "--", *TINY, *(flags or [])]


@pytest.fixture(scope="module")
def splits(photo_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same images to learn from and to test on."""
    folder = tmp_path_factory.mktemp("splits")
    for name in ("train", "test"):
        (folder / name).symlink_to(photo_folder)
    return folder


@pytest.fixture(scope="module")
def study(photo_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The images, and the output of a finished study of two runs."""
    output = tmp_path_factory.mktemp("evidence") / "out"
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    assert evidence.main(command(photo_folder, output)) == 0
    return photo_folder, output


def test_a_study_leaves_numbers_a_table_and_a_picture(study: tuple[Path, Path]) -> None:
    _, output = study
    content = json.loads((output / "core.json").read_text())
    assert [(run["variant"], run["seed"]) for run in content["runs"]] == [("plain", 0), ("cocor", 0)]
    plain, cocor = content["runs"]
    assert [at for at, _ in cocor["knn"]] == [0, 1, 2] and plain["similarity"] == {}
    assert cocor["last"]["gradient_consistency"] > 0 and cocor["last"]["hypergradient_norm"] >= 0
    assert set(cocor["similarity"]) == {"1", "2", "3"} and cocor["images_per_s"] > 0 and cocor["minutes"] > 0
    assert "data" not in cocor["flags"] and cocor["flags"]["batch_size"] == "8"
    text = (output / "core.md").read_text()
    assert "| MoCo v2 + CoCor |" in text and "evidence.py --study core" in text
    assert (output / "core.png").stat().st_size > 10_000


def test_what_is_finished_is_not_done_again(study: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    images, output = study
    before = {path: path.stat().st_mtime_ns for path in output.rglob("metrics.jsonl")}
    assert evidence.main(command(images, output)) == 0
    assert "2 runs, 2 of them done" in capsys.readouterr().out
    assert len(before) == 2 and {path: path.stat().st_mtime_ns for path in output.rglob("metrics.jsonl")} == before


def test_results_of_other_flags_are_not_mixed(study: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    images, output = study
    assert evidence.main(command(images, output, flags=["--lr", "0.5"])) == 2
    assert "a finished run with other lr; choose another --output" in capsys.readouterr().err


def test_results_of_an_edited_configuration_or_of_other_defaults_are_not_mixed(
    study: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    images, output = study
    marker = output / "runs" / "moco-cocor-seed0.done.json"
    before = marker.read_text()
    done = json.loads(before)
    file = load([f"--config={BENCHMARKS.parent / 'configs' / 'cifar10_moco.yaml'}"])
    assert done["all settings"]["lr"] == file.lr and "lr" not in done
    done["all settings"] |= {"lr": 0.06, "consistency_beta": 1.0}
    marker.write_text(json.dumps(done))
    assert evidence.main(command(images, output)) == 2
    error = capsys.readouterr().err
    assert "moco-cocor-seed0: a finished run with other consistency_beta, lr; choose another --output" in error
    done = json.loads(before)
    del done["all settings"]["composite_size"]  # as if it were newer than the run
    marker.write_text(json.dumps(done))
    assert evidence.main(command(images, output)) == 0
    marker.write_text(before)


def test_a_report_names_the_settings_and_the_machine_of_its_runs(study: tuple[Path, Path]) -> None:
    """It may be made elsewhere, and later."""
    images, output = study
    marker = output / "runs" / "moco-plain-seed0.done.json"
    before = marker.read_text()
    done = json.loads(before)
    done["machine"] |= {"cores": 1234}
    marker.write_text(json.dumps(done))
    assert evidence.main(command(images, output, "--report-only")) == 0
    content = json.loads((output / "core.json").read_text())
    assert [machine["cores"] for machine in content["machine"]] != [1234] and len(content["machine"]) == 2
    assert "1234 cores" in (output / "core.md").read_text()
    plain, cocor = content["runs"]
    assert plain["settings"] == done["all settings"] and cocor["settings"]["consistency_weight"] == 10
    marker.write_text(before)
    assert evidence.main(command(images, output, "--report-only")) == 0
    assert json.loads((output / "core.json").read_text())["machine"] == json.loads(before)["machine"]


def test_a_report_is_of_what_was_measured_whatever_flags_it_is_asked_with(study: tuple[Path, Path]) -> None:
    images, output = study
    assert evidence.main(command(images, output, "--report-only", flags=["--lr", "0.5"])) == 0
    runs = json.loads((output / "core.json").read_text())["runs"]
    assert len(runs) == 2 and all(run["flags"].get("lr") != "0.5" for run in runs)


def test_a_run_that_was_stopped_goes_on(study: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    images, output = study
    runs = output / "runs"
    (runs / "moco-cocor-seed0.done.json").unlink()
    assert evidence.main(command(images, output, "--report-only")) == 0  # the other one
    assert len(json.loads((output / "core.json").read_text())["runs"]) == 1
    assert evidence.main(command(images, output)) == 0
    assert "2 runs, 1 of them done" in capsys.readouterr().out
    assert "going on from" in (runs / "moco-cocor-seed0" / "log.txt").read_text()
    assert len(json.loads((output / "core.json").read_text())["runs"]) == 2


def test_a_finished_study_is_evaluated_and_goes_on_where_it_was_stopped(
    study: tuple[Path, Path], splits: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    images, output = study
    with_probe = command(images, output, "--linear", str(splits))
    runs = output / "runs"
    printed = {path: path.stat().st_mtime_ns for path in runs.glob("moco-*-seed0.txt")}
    script = [sys.executable, "-u", str(BENCHMARKS / "evidence.py"), *with_probe]
    with subprocess.Popen(script, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if "started moco-cocor-seed0: linear probe" in line:
                time.sleep(1)
                process.send_signal(signal.SIGTERM)
    assert process.returncode == 130 and not list(runs.glob("*.linear.json"))

    assert evidence.main(with_probe) == 0
    said = capsys.readouterr().out
    assert "2 runs, 0 of them done" in said and "finished moco-plain-seed0" in said and "| linear accuracy, % |" in said
    assert {path: path.stat().st_mtime_ns for path in printed} == printed  # nothing was trained
    plain, cocor = json.loads((output / "core.json").read_text())["runs"]
    probe = json.loads((runs / "moco-plain-seed0" / "linear" / "linear.json").read_text())
    assert plain["linear"] == probe["result"]["top1"] > 0 and 0 < cocor["linear"] <= 1
    assert not (runs / "moco-plain-seed0" / "linear" / "features").exists()

    assert evidence.main(with_probe) == 0
    assert "2 runs, 2 of them done" in capsys.readouterr().out
    assert evidence.main(command(images, output)) == 0  # without the flag no column
    assert "linear" not in capsys.readouterr().out and "linear" not in (output / "core.json").read_text()


class Fake(Training):
    """Its training and its evaluation say where they run."""

    def command(self) -> list[str]:
        code = f"""
import os, time
from pathlib import Path
time.sleep({self.seed} / 4)
print(os.environ["CUDA_VISIBLE_DEVICES"])
folder = Path({str(self.result.parent)!r})
folder.mkdir(parents=True, exist_ok=True)
(folder / "linear.json").write_text("{{}}")
"""
        return [sys.executable, "-c", code]


def test_an_evaluation_takes_the_place_of_its_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    fakes = [Fake("moco", "plain", seed, tmp_path / f"{seed}", {}, tmp_path) for seed in range(4)]
    said: list[str] = []
    Crew(2, 2, None, say=said.append).run(fakes)
    for fake in fakes:
        assert fake.is_done()
        trained, evaluated = (tmp_path / f"{fake.name}.{ending}" for ending in ("txt", "linear.txt"))
        assert trained.read_text() == evaluated.read_text() in ("5\n", "7\n")
    assert said.index("started 0: linear probe") < said.index("started 2")
    (tmp_path / "0.done.json").unlink()
    Crew(1, 1, None, say=said.append).run(fakes)
    assert said[-3:] == ["started 0", "started 0: linear probe", "finished 0"]  # trained anew: evaluated anew


def test_an_evaluation_that_fails_is_named_with_its_reason(tmp_path: Path, splits: Path) -> None:
    training = Training("moco", "plain", 0, tmp_path / "run", {"gpus": 0, "workers": 1}, splits)
    training.folder.mkdir()
    training.mark()
    crew = Crew(1, 0, None, say=lambda text: None)
    crew.run([training])
    assert f"cocor-eval: error: {training.folder}: holds neither backbone.safetensors nor" in crew.failed["run"]
    assert not training.is_done() and training.is_trained()


def test_a_run_that_fails_is_named_with_its_reason(
    photo_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = command(photo_folder, tmp_path / "out", "--only", "plain", flags=["--backbone", "resnet19"])
    assert evidence.main(wrong) == 2
    assert (
        "moco-plain-seed0: cocor-train: error: --backbone resnet19: timm has no such model" in capsys.readouterr().err
    )


def test_time_is_up(photo_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert evidence.main(command(photo_folder, tmp_path / "out", "--minutes", "0")) == 0
    assert "2 runs are not finished: the same command goes on" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--only", "nothing"], "no such variant; there are plain, cocor, constants"),
        (["--study", "clock", "--only", "as-long"], "plain-as-long needs the variants it is timed by"),
        (["--jobs", "0"], "--jobs: 0 must be at least 1"),
        (["--epochs", "-1"], "--epochs: -1 must be at least 1"),
        (["--minutes", "nan"], "--minutes: nan must be a number of 0 or more"),
        (["--gpus", "-1"], "--gpus: -1 must be at least 0"),
        (["--output", "/dev/null/runs"], "--output /dev/null/runs: /dev/null is no folder"),
        (["--study", "all"], "--study: all is not one of core"),
        (["--configs", "nowhere/{method}.yaml"], "nowhere/moco.yaml"),
        (["--configs", "nowhere/{name}.yaml"], "nowhere/{name}.yaml"),
        (["--seeds", "0", "1", "0"], "--seeds 0 1 0: names one twice"),
        (["--methods", "moco", "moco"], "--methods moco moco: names one twice"),
        (["--gpus", "99"], "--gpus 99: have "),
    ],
)
def test_mistakes_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str], words: str) -> None:
    assert evidence.main(command(tmp_path, tmp_path / "out", *more)) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1 and "Traceback" not in error


@pytest.mark.parametrize("name", STUDIES)
@pytest.mark.parametrize("method", ["moco", "simsiam", "supcon", "byol", "intl"])
def test_every_variant_of_every_study_is_a_configuration(name: str, method: str) -> None:
    """Variants differ from each other, and in flags that exist."""
    seen = set()
    for variant in STUDIES[name]:
        flags = [f"--{key.replace('_', '-')}={value}" for key, value in variant.flags.items()]
        file = BENCHMARKS.parent / "configs" / f"cifar10_{method}.yaml"
        config = load([f"--config={file}", "--epochs=20", *flags])
        assert config.method == method
        seen.add(str(config.to_dict()) + str(variant.like))
    assert len(seen) == len(STUDIES[name]) == len({variant.key for variant in STUDIES[name]})


def test_tuning_changes_one_thing_at_a_time() -> None:
    plain, centre, *others = STUDIES["tune"]
    assert (plain.key, centre.key) == ("plain", "centre") and len(others) >= 12
    assert centre.flags == {"consistency_beta": 8.0, "consistency_weight": 10.0, "mmnn_lr": 0.5}
    for variant in others:
        assert len(variant.flags.items() - centre.flags.items()) == 1, variant.key


def test_variants_are_chosen_by_parts_of_their_names(tmp_path: Path) -> None:
    def chosen(*only: str) -> list[str]:
        words = ["--study", "tune", "--data", str(tmp_path), "--only", *only]
        return [variant.key for variant in evidence._variants(evidence._parser().parse_args(words))]

    assert chosen("plain", "centre", "mmnn+lr-5") == ["plain", "centre", "tune-mmnn-lr-5"]
    assert chosen("beta-1", "weight-3") == ["tune-beta-1", "tune-weight-3"]
    assert len(chosen("beta")) == len(chosen("weight")) == 3 and len(chosen("released")) == 2


def test_a_path_that_leads_nowhere_is_told_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert evidence.main(command(tmp_path / "nowhere", tmp_path / "out")) == 2
    printed = capsys.readouterr()
    assert printed.err == f"evidence.py: error: --data {tmp_path}/nowhere: no such folder or file; check the path\n"
    assert not printed.out
    for name, words in (("nowhere", "no such folder"), (".", "has no train folder; a probe needs train/CLASS/")):
        assert evidence.main(command(tmp_path, tmp_path / "out", "--linear", str(tmp_path / name))) == 2
        printed = capsys.readouterr()
        assert f"evidence.py: error: --linear: {tmp_path}" in printed.err and words in printed.err and not printed.out


def measured(variant: str, seed: int, accuracy: float, rate: float = 100.0) -> Measured:
    training = Training("moco", variant, seed, Path(f"{variant}-{seed}"), {"batch_size": 8})
    curve = [(0.0, 0.1), (10.0, accuracy)]
    similarity = {} if variant == "plain" else {1: [(9.0, 0.82)], 3: [(9.0, 0.6)]}
    return Measured(training, curve, similarity, {key: [(9.0, 0.8)] for key in similarity}, rate, 2.0, {})


def test_gains_are_over_the_same_seed() -> None:
    plain = Row("moco", "plain", "plain", [measured("plain", 0, 0.70), measured("plain", 1, 0.60)])
    cocor = Row("moco", "cocor", "+ CoCor", [measured("cocor", seed, 0.75 - 0.1 * seed) for seed in (1, 0, 2)])
    assert gains(cocor, plain) == pytest.approx([0.05, 0.05])
    assert (spread([0.7, 0.6]), spread([0.7]), spread([])) == ("65.0 ± 7.1", "70.0", "-")
    assert (spread([0.7, math.nan, 0.6]), spread([math.nan])) == ("65.0 ± 7.1 (2 of 3)", "-")
    text = table([plain, cocor])
    assert "| MoCo v2 + CoCor | 65.0 ± 10.0 | +5.0 ± 0.0 | 3 | 10 | 2.0 ± 0.0 | 100 | 0.82/0.80 0.60/0.80 | - |" in text
    evaluated = replace(cocor, runs=[replace(run, linear=run.accuracy + 0.1) for run in cocor.runs])
    other = replace(plain, runs=[replace(run, linear=run.accuracy + 0.08) for run in plain.runs])
    text = table([other, evaluated])
    assert "| k-NN accuracy, % | gain over plain | linear accuracy, % | gain over plain | seeds |" in text
    assert "| MoCo v2 + CoCor | 65.0 ± 10.0 | +5.0 ± 0.0 | 75.0 ± 10.0 | +7.0 ± 0.0 | 3 |" in text
    assert math.isnan(Measured(plain.runs[0].training, [], {}, {}, 1.0, 1.0, {}).accuracy)


def test_equal_time_is_more_epochs_by_the_ratio_of_speeds() -> None:
    rows = [
        Row("moco", "plain", "plain", [measured("plain", 0, 0.7, rate=350)]),
        Row("moco", "cocor", "+ CoCor", [measured("cocor", 0, 0.7, rate=100)]),
    ]
    longer = Variant("plain-as-long", "", like="cocor")
    assert evidence._as_long(("moco", longer, 0), rows, 20) == 70
    assert evidence._as_long(("simsiam", longer, 0), rows, 20) is None
    assert evidence._as_long(("moco", longer, 1), rows, 20) is None
    rows[0].runs.append(measured("plain", 1, 0.7, rate=700))
    rows[1].runs.append(measured("cocor", 1, 0.7, rate=100))
    assert [evidence._as_long(("moco", longer, seed), rows, 20) for seed in (0, 1)] == [70, 140]
    short = Row("moco", "cocor", "+ CoCor", [measured("cocor", 0, 0.7, rate=math.nan)])
    assert evidence._as_long(("moco", longer, 0), [rows[0], short], 20) is None


def test_what_cannot_be_timed_is_named(photo_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--study", "clock", "--only", "plain", "cocor", "as-long", "--minutes", "0"]
    assert evidence.main(command(photo_folder, tmp_path / "out", *words)) == 0
    assert "not run: moco-plain-as-long-seed0; the runs to be as long as have not ended" in capsys.readouterr().out


def test_flags_behind_the_dashes_are_read_as_the_command_reads_them() -> None:
    words = ["--lr", "0.1", "--stem=small", "--no-sync-bn", "--log-samples", "--lengths", "1,2"]
    assert shared_flags(words, []) == {
        "lr": "0.1", "stem": "small", "sync_bn": "false", "log_samples": "true", "lengths": "1,2"
    }  # fmt: skip
    with pytest.raises(UserError, match="begin with --"):
        shared_flags(["lr", "0.1"], [])


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--seed", "3"], "--seed behind the --: the study sets it; give --seeds before the --"),
        (["--epochs=3"], "give --epochs before the --"),
        (["--consistency", "abs"], "--consistency behind the --: the variant plain sets it; leave it out"),
        (["--dry-run"], "--dry-run behind the --: nothing would be trained"),
        (["--overwrite"], "--overwrite behind the --: the same command goes on, another --output begins anew"),
        (["--knn-every", "0"], "--val-data: name held-out class folders, on which runs are compared by k-NN"),
        (["--loader", "synthetic"], "--val-data: name held-out class folders, on which runs are compared by k-NN"),
    ],
)
def test_flags_that_would_spoil_the_comparison_are_refused(
    photo_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], words: str
) -> None:
    assert evidence.main(command(photo_folder, tmp_path / "out", flags=flags)) == 2
    printed = capsys.readouterr()
    assert words in printed.err and printed.err.count("\n") == 1 and not printed.out


def test_images_to_compare_runs_on_are_asked_for_before_anything_runs(
    photo_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--study", "core", "--data", str(photo_folder), "--gpus", "0", "--output", str(tmp_path / "out")]
    assert evidence.main(words) == 2
    printed = capsys.readouterr()
    assert "error: --val-data: name held-out class folders" in printed.err and not printed.out


class Sleeping(Training):
    def command(self) -> list[str]:
        return [sys.executable, "-c", "import time; time.sleep(60)"]


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGUSR1])
def test_no_training_outlives_a_study_that_is_asked_to_stop(tmp_path: Path, number: signal.Signals) -> None:
    """As when its terminal is closed, or when its time on a cluster is nearly up."""
    said: list[str] = []
    crew, before = Crew(1, 0, None, say=said.append), signal.getsignal(number)
    running = []

    def ask() -> None:
        running.extend(run.process for run in crew._running)
        os.kill(os.getpid(), number)

    timer = threading.Timer(0.5, ask)
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        crew.run([Sleeping("moco", "plain", 0, tmp_path / "run", {})])
    assert [process.returncode for process in running] == [-signal.SIGTERM] and crew.stopped == ["run"]
    assert signal.getsignal(number) is before
    assert said[-1] == "stopping 1 runs: the same command goes on from there"


def test_runs_stop_when_the_study_does(tmp_path: Path) -> None:
    """Ctrl-C ends the trainings and leaves none behind."""
    crew = Crew(2, 0, time.monotonic() + 1, say=lambda text: None)
    trainings: list[Any] = [Sleeping("moco", "plain", seed, tmp_path / f"{seed}", {}) for seed in range(3)]
    begin = time.monotonic()
    crew.run(trainings)
    assert time.monotonic() - begin < 20 and not crew._running
    assert set(crew.failed) | set(crew.stopped) == {"0", "1", "2"}
