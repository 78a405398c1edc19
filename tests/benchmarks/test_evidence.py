"""Studies with real, tiny trainings; their arithmetic with numbers made up."""

import json
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from benchmarks.evidence import __main__ as evidence
from benchmarks.evidence.report import draw, gain, table, values
from benchmarks.evidence.runner import Training, run_all
from benchmarks.evidence.studies import STUDIES, Variant
from cocor.config.resolve import load

ROOT = Path(__file__).parents[2]
TINY = ["--backbone", "test_resnet", "--stem", "imagenet", "--image-size=32", "--loader", "torch", "--workers", "1"]
TINY += [
    "--batch-size",
    "8",
    "--queue-size",
    "16",
    "--key-bn-splits",
    "2",
    "--log-every",
    "1",
    "--knn-k",
    "3",
    "--no-plot",
]


class Study:
    """Study of two tiny runs on ``images``, with its results in ``output``."""

    def __init__(self, images: Path, output: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.images, self.output, self._capsys = images, output, capsys

    def command(self, *more: str, flags: Sequence[str] = ()) -> list[str]:
        where = ["--data", str(self.images), "--val-data", str(self.images), "--output", str(self.output)]
        which = ["--study", "core", "--methods", "moco", "--only", "plain", "cocor", "--seeds", "0", "--epochs", "2"]
        return [*which, *where, "--gpus", "0", "--jobs", "2", *more, "--", *TINY, *flags]

    def __call__(self, *more: str, flags: Sequence[str] = (), code: int = 0) -> str:
        """All that the command prints, which ends with ``code``."""
        self._capsys.readouterr()
        assert evidence.main(self.command(*more, flags=flags)) == code
        return "".join(self._capsys.readouterr())

    def runs(self) -> list[dict[str, Any]]:
        return json.loads((self.output / "core.json").read_text())["runs"]


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("evidence") / "out"


@pytest.fixture
def study(photo_folder: Path, output: Path, capsys: pytest.CaptureFixture[str]) -> Study:
    """A finished study, which all tests share."""
    study = Study(photo_folder, output, capsys)
    if not output.exists():
        study()
    return study


@pytest.fixture
def fresh(photo_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Study:
    return Study(photo_folder, tmp_path / "out", capsys)


def test_a_study_leaves_numbers_and_a_picture(study: Study) -> None:
    plain, cocor = study.runs()
    assert [(run["variant"], run["seed"]) for run in (plain, cocor)] == [("plain", 0), ("cocor", 0)]
    assert [at for at, _ in cocor["knn"]] == [0, 1, 2] and plain["similarity"] == {}
    assert cocor["last"]["gradient_consistency"] > 0 and cocor["last"]["hypergradient_norm"] >= 0
    assert set(cocor["similarity"]) == {"1", "2", "3"} and cocor["images_per_s"] > 0 and cocor["minutes"] > 0
    assert "data" not in cocor["flags"] and cocor["flags"]["batch_size"] == "8"
    assert cocor["settings"]["consistency_weight"] == 10 and cocor["machine"]["cores"] >= 1
    text = (study.output / "core.md").read_text()
    assert "| MoCo v2 + CoCor |" in text and "benchmarks.evidence --study core" in text
    assert (study.output / "core.png").stat().st_size > 10_000
    before = {path: path.stat().st_mtime_ns for path in study.output.rglob("metrics.jsonl")}
    assert "2 runs, 2 of them done" in study()
    assert len(before) == 2 and {path: path.stat().st_mtime_ns for path in before} == before


def test_results_of_other_settings_are_not_mixed(study: Study) -> None:
    assert "a finished run with other lr; choose another --output" in study(flags=["--lr", "0.5"], code=2)
    study("--report-only", flags=["--lr", "0.5"])  # of what was measured
    assert len(study.runs()) == 2
    marker = study.output / "runs" / "moco-cocor-seed0.done.json"
    before = marker.read_text()
    done = json.loads(before)
    done["settings"] |= {"lr": 0.06, "consistency_beta": 1.0}  # as of an edited file, or of other defaults
    marker.write_text(json.dumps(done))
    other = "moco-cocor-seed0: a finished run with other consistency_beta, lr; choose another --output"
    assert other in study(code=2)
    done = json.loads(before)
    del done["settings"]["composite_size"]  # as if it were newer than the run
    done["machine"]["cores"] = 1234  # a report may be made elsewhere
    marker.write_text(json.dumps(done))
    study()
    assert "1234 cores" in (study.output / "core.md").read_text()
    marker.write_text(before)


def test_a_run_that_was_stopped_goes_on(study: Study) -> None:
    runs = study.output / "runs"
    (runs / "moco-cocor-seed0.done.json").unlink()
    study("--report-only")
    assert len(study.runs()) == 1  # the other one
    assert "2 runs, 1 of them done" in study()
    assert "going on from" in (runs / "moco-cocor-seed0" / "log.txt").read_text()
    assert len(study.runs()) == 2


def test_a_finished_study_is_evaluated(study: Study, tmp_path: Path) -> None:
    for name in ("train", "test"):
        (tmp_path / name).symlink_to(study.images)
    probe, runs = ("--linear", str(tmp_path)), study.output / "runs"
    printed = {path: path.stat().st_mtime_ns for path in runs.glob("moco-*-seed0.txt")}
    said = study(*probe)
    assert "2 runs, 0 of them done" in said and "finished moco-plain-seed0" in said and "| linear accuracy, % |" in said
    assert {path: path.stat().st_mtime_ns for path in printed} == printed  # nothing was trained
    plain, cocor = study.runs()
    result = json.loads((runs / "moco-plain-seed0" / "linear" / "linear.json").read_text())["result"]
    assert plain["linear"] == result["top1"] > 0 and 0 < cocor["linear"] <= 1
    assert "2 runs, 2 of them done" in study(*probe)
    assert "linear" not in study() and "linear" not in study.runs()[0]  # without the flag no column


class Fake(Training):
    """Runs a program of a line; its name says which."""

    def command(self) -> list[str]:
        slow = f"import os, time; time.sleep({self.seed} / 4); print(os.environ['CUDA_VISIBLE_DEVICES'])"
        return [sys.executable, "-c", "import time; time.sleep(60)" if self.method == "sleeps" else slow]


def fake(folder: Path, seed: int = 0, method: str = "moco", linear: Path | None = None) -> Training:
    return Fake(method, Variant("plain", "plain"), seed, folder, {}, {}, {} if linear is None else {"linear": linear})


def test_an_evaluation_follows_its_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    fakes = [fake(tmp_path / f"{seed}", seed, linear=tmp_path) for seed in range(4)]
    said: list[str] = []
    assert run_all(fakes, 2, 2, math.inf, said.append) == {}
    for number, one in enumerate(fakes):
        assert one.is_done()
        trained, evaluated = (tmp_path / f"{number}.{ending}" for ending in ("txt", "linear.txt"))
        assert trained.read_text() == evaluated.read_text() in ("5\n", "7\n")
    assert said.index("started 0: linear probe") < said.index("started 2")
    (tmp_path / "0.done.json").unlink()
    assert run_all(fakes, 1, 1, math.inf, said.append) == {}
    assert said[-3:] == ["started 0", "started 0: linear probe", "finished 0"]  # trained anew: evaluated anew


def test_failures_are_named(fresh: Study) -> None:
    error = fresh("--only", "plain", flags=["--backbone", "resnet19"], code=2)
    assert "moco-plain-seed0: cocor-train: error: --backbone resnet19: timm has no such model" in error
    said = fresh("--minutes", "0")
    assert "moco-plain-seed0 is not finished: stopped; the same command goes on" in said
    said = fresh("--study", "clock", "--only", "plain", "cocor", "as-long", "--minutes", "0")
    assert "moco-plain-as-long-seed0 is not finished: waits for those that it is" in said


@pytest.mark.parametrize(
    ("more", "flags", "words"),
    [
        ("--only nothing", "", "no such variant; there are plain, cocor, constants"),
        ("--study clock --only as-long", "", "plain-as-long needs the variants it is timed by"),
        ("--jobs 0", "", "--jobs: 0 must be at least 1"), ("--study all", "", "--study: all is not one of core"),
        ("--minutes nan", "", "--minutes: nan must be a number of 0 or more"),
        ("--configs nowhere/{method}.yaml", "", "nowhere/moco.yaml"),
        ("--linear nowhere", "", "nowhere: no such folder"), ("", "lr", "unexpected argument lr"),
        ("", "--seed 3", "--seed behind the --: the study sets it"),
        ("", "--epochs=3", "--epochs behind the --: the study sets it"),
        ("", "--consistency abs", "--consistency behind the --: the variant plain sets it; leave it out"),
        ("", "--dry-run", "--dry-run behind the --: the study sets it; leave it out"),
        ("", "--knn-every 0", "--val-data: name held-out class folders, on which runs are compared by k-NN"),
        ("", "--loader synthetic", "--val-data: name held-out class folders, on which runs are compared by k-NN"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line(more: str, flags: str, words: str, fresh: Study) -> None:
    error = fresh(*more.split(), flags=flags.split(), code=2)
    assert words in error and error.count("\n") == 1


def test_shared_flags_are_those_of_cocor_train() -> None:
    words = ["--lr", "0.1", "--stem=small", "--no-sync-bn", "--log-samples", "--lengths", "1,2"]
    assert evidence.shared_flags(words, []) == {
        "lr": "0.1", "stem": "small", "sync_bn": "false", "log_samples": "true", "lengths": "1,2"
    }  # fmt: skip


@pytest.mark.parametrize("name", STUDIES)
@pytest.mark.parametrize("method", ["moco", "simsiam", "barlow"])
def test_every_variant_is_a_configuration(name: str, method: str) -> None:
    """Variants differ from each other, and in flags that exist."""
    seen, keys = set(), set()
    for variant in STUDIES[name]:
        if variant.flags.get("auxiliary") == "multiview" and method not in ("moco", "simsiam"):
            continue  # some methods have no loss of further positives
        flags = [f"--{key.replace('_', '-')}={value}" for key, value in variant.flags.items()]
        config = load([f"--config={ROOT / 'configs' / f'cifar10_{method}.yaml'}", "--epochs=20", *flags])
        assert config.method == method
        seen.add(str(config.to_dict()) + str(variant.like))
        keys.add(variant.key)
    assert len(seen) == len(keys)


def test_variants_are_chosen_by_name_or_part(tmp_path: Path) -> None:
    plain, centre, *others = STUDIES["tune"]
    assert (plain.key, centre.key) == ("plain", "centre") and len(others) >= 12
    assert all(len(variant.flags.items() - centre.flags.items()) == 1 for variant in others)

    def chosen(*only: str, study: str = "tune") -> list[str]:
        words = ["--study", study, "--data", str(tmp_path), "--only", *only]
        return [variant.key for variant in evidence.variants_of(evidence.parser().parse_args(words))]

    assert chosen("plain", "centre", "mmnn+lr-5") == ["plain", "centre", "tune-mmnn-lr-5"]
    assert chosen("beta-1", "weight-3") == ["tune-beta-1", "tune-weight-3"]
    assert len(chosen("beta")) == len(chosen("weight")) == 3 and len(chosen("released")) == 2
    assert chosen("plain", "heavy", study="decisive") == ["plain", "heavy"]  # not plain-as-long, nor heavy-no-target


def measured(variant: str, seed: int, accuracy: float, rate: float = 100.0, **more: Any) -> dict[str, Any]:
    similarity = {} if variant == "plain" else {1: [(9.0, 0.82)], 3: [(9.0, 0.6)]}
    title = "plain" if variant == "plain" else "+ CoCor"
    run = {"method": "moco", "variant": variant, "title": title, "seed": seed, "knn": [(0.0, 0.1), (10.0, accuracy)]}
    target = {key: [(9.0, 0.8)] for key in similarity}
    return run | {"similarity": similarity, "target": target, "images_per_s": rate, "minutes": 2.0, "last": {}, **more}


def test_the_picture_shows_what_is_kept(tmp_path: Path) -> None:
    widths = []
    for more in ({}, {"invariance": {"hue": 0.5}}):
        draw([measured(name, 0, 0.6, **more) for name in ("plain", "cocor")], tmp_path / "p.png", clock=False)
        with Image.open(tmp_path / "p.png") as picture:
            widths.append(picture.width)
    assert widths[1] == pytest.approx(1.5 * widths[0], abs=2)  # a third panel


def test_gains_are_over_the_same_seed() -> None:
    assert (values([0.7, 0.6]), values([0.7]), values([])) == ("70.0, 60.0", "70.0", "-")
    assert (values([0.7, math.nan, 0.6]), values([math.nan])) == ("70.0, 60.0 (2 of 3)", "-")
    assert (gain([0.05, -0.01]), gain([])) == ("+5.0, -1.0", "-")
    assert gain([0.03, 0.01, 0.02]) == "+2.0 [-0.5, +4.5], p 0.074"  # t of 2 degrees of freedom: 4.303 / sqrt(3)
    runs = [measured("plain", 0, 0.70), measured("plain", 1, 0.60)]
    runs += [measured("cocor", seed, 0.75 - 0.1 * seed) for seed in (1, 0, 2)]
    line = "| MoCo v2 + CoCor | 65.0 ± 10.0 | +5.0, +5.0 | 3 | 10 | 2.0 ± 0.0 | 100 | 0.82/0.80 0.60/0.80 | - |"
    assert line in table(runs)
    more = {"plain": 0.08, "cocor": 0.1}
    text = table([run | {"linear": run["knn"][-1][1] + more[run["variant"]]} for run in runs])
    assert "| k-NN accuracy, % | gain over plain | linear accuracy, % | gain over plain | seeds |" in text
    assert "| MoCo v2 + CoCor | 65.0 ± 10.0 | +5.0, +5.0 | 75.0 ± 10.0 | +7.0, +7.0 | 3 |" in text


def test_equal_time_is_more_epochs() -> None:
    longer = Variant("plain-as-long", "", like="cocor")

    def epochs(runs: list[dict[str, Any]], method: str = "moco", seed: int = 0) -> int | None:
        return evidence.epochs_as_long(method, longer, seed, runs, 20)

    runs = [measured("plain", 0, 0.7, 350), measured("cocor", 0, 0.7, 100)]
    assert (epochs(runs), epochs(runs, "simsiam"), epochs(runs, seed=1)) == (70, None, None)
    runs += [measured("plain", 1, 0.7, 700), measured("cocor", 1, 0.7, 100)]
    assert [epochs(runs, seed=seed) for seed in (0, 1)] == [70, 140]
    assert epochs([runs[0], measured("cocor", 0, 0.7, math.nan)]) is None


def test_runs_stop_at_the_deadline(tmp_path: Path) -> None:
    begin, fakes = time.monotonic(), [fake(tmp_path / f"{seed}", seed, "sleeps") for seed in range(3)]
    assert run_all(fakes, 2, 0, time.monotonic() + 1, lambda text: None) == dict.fromkeys("012", "stopped")
    assert time.monotonic() - begin < 20
