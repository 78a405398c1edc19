"""Keep the registry of the paper's tables, the recipes and what the paper states together."""

import math
import re
from pathlib import Path
from typing import Any

import pytest
from helpers.runs import ROOT, Capture

from benchmarks import paper
from benchmarks.evidence.registry import DRAWINGS, SCALES, TABLES, Column, Row, Table
from cocor.auxiliary import AUXILIARIES
from cocor.config.resolve import load
from cocor.eval.cli import _parser
from cocor.eval.datasets.protocols import PROTOCOLS
from cocor.eval.detect.average_precision import MEASURES
from cocor.objective.mmnn import by_length, similarity_at
from loaders.errors import UserError

# All tables and figures of the paper, by the labels in its source, and the equations of the loss.
LABELS = """fig:overview fig:pipeline fig:aug_strength tab:linear_eval tab:linear_eval_in1k tab:obj_det fig:post_hoc
tab:aug_aware_comparison tab:strong_aug_comparison tab:ablation_basic_da tab:ablation_mmnn fig:ablation_aug_len
tab:ablation_label_amount fig:img_var fig:const_select tab:constant_l_d tab:stronger_augs tab:more_baseline
tab:training_time tab:da_ordering eq:consist_loss eq:consist_loss_alt"""
# The appendix on the set-up, and the main text: batch 256, SGD with cosine, 200 epochs, SupCon 100.
ALL = {"batch_size": 256, "recipe": "paper", "lengths": (1, 2, 3), "label_fraction": 0.01}
SGD = {"optimiser": "sgd", "momentum": 0.9, "weight_decay": 1e-4, "warmup_epochs": 0}
STATED: dict[str, dict[str, Any]] = {
    "moco": SGD | {"lr": 0.03, "embedding_dim": 128, "queue_size": 65536, "key_momentum": 0.999, "epochs": 200},
    "simsiam": SGD | {"lr": 0.05, "projector_dim": 2048, "epochs": 200},
    "supcon": SGD | {"lr": 0.03, "embedding_dim": 128, "epochs": 100},
    "byol": {},
    "intl": {},
}
OF_TABLES: dict[str, dict[str, Any]] = {
    "aug-aware": {"backbone": "resnet34"}, "pools": {"epochs": 500}, "labels": {"epochs": 100},
    "lengths": {"epochs": 50}, "constants": {"epochs": 50},
}  # fmt: skip
RECIPES = {  # of single tables: the same as the registry's flags
    "moco_in100_lengths": ("lengths", "moco", "--consistency none"),
    "simsiam_in100_lengths": ("lengths", "simsiam", "--consistency none"),
    "simsiam_in100_labels": ("labels", "simsiam", "--label-fraction 0.01"),
    "simsiam_in100_pools": ("pools", "simsiam", "--pool all"),
    "simsiam_in100_r34": ("aug-aware", "simsiam", ""),
}


def test_every_table_and_figure_is_there() -> None:
    there = [*DRAWINGS, *(label for table in TABLES.values() for label in table.labels)]
    assert sorted(there) == sorted(LABELS.split())


def test_lengths_and_constants_are_swept() -> None:
    lengths = [paper.Plan(TABLES["lengths"], "in100").config(row).lengths for row in TABLES["lengths"].rows[:7]]
    assert lengths == [(1,), (2,), (3,), (4,), (5,), (10,), (1, 2, 3)]
    plan = paper.Plan(TABLES["constants"], "in100")
    configs = [plan.config(row) for row in plan.table.rows[:12]]
    swept = [(n, similarity_at(by_length(config.constants), n)) for config in configs for n in config.lengths]
    best = {1: 0.8, 2: 0.75, 3: 0.65}
    assert swept == [(n, pytest.approx(at + step)) for n, at in best.items() for step in (-0.2, -0.1, 0.0, 0.1)]


@pytest.mark.parametrize("key", TABLES)
def test_rows_have_the_papers_settings(key: str) -> None:
    for scale in TABLES[key].scales:
        plan = paper.Plan(TABLES[key], scale)
        for row in plan.rows():
            config, named = plan.config(row), {word[2:].replace("-", "_") for word in row.flags.split()}
            stated = ALL | STATED[row.method] | OF_TABLES.get(key, {})
            wrong = {name for name, value in stated.items() if getattr(config, name) != value}
            assert wrong <= named, row.title
            assert (config.consistency_beta, config.consistency_weight) == (1.0, 1.0)
            assert config.mmnn_lr == (1e-3 if config.mmnn_optimiser == "adam" else 0.05)
            assert len(row.paper) in (0, len(plan.columns)) and plan.hours(row) > 0


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_of_single_tables_agree(name: str) -> None:
    key, method, flags = RECIPES[name]
    (row,) = (row for row in TABLES[key].rows if (row.method, row.flags) == (method, flags))
    mine = paper.Plan(TABLES[key], "in100").config(row).to_dict() | {"output": None}
    assert mine == load(["--config", str(ROOT / f"configs/{name}.yaml"), *flags.split()]).to_dict() | {"output": None}


@pytest.mark.parametrize("key", TABLES)
def test_every_command_parses(key: str) -> None:
    for scale in (*TABLES[key].scales, *(("cifar", "tiny100") if TABLES[key].reduced else ())):
        plan = paper.Plan(TABLES[key], scale)
        jobs = [job for job in paper.steps(plan, key) if isinstance(job, paper.Job)]
        assert len(jobs) >= 2 * len(plan.rows()) - 2 and len(set(jobs)) == len(jobs)
        for job in jobs:
            program, *words = job.words
            if program == "cocor-train":
                load(paper._found(words))
            else:
                options = _parser().parse_all(words)
                assert options.command == "detect" or options.dataset in (None, *PROTOCOLS)
        keys = {"linear": [""], "fewshot": ["5", "10"], "detect": MEASURES, "": ["knn", "hours"]}
        assert all(column.key in keys[column.command.partition(" ")[0]] for column in plan.columns)


def test_projections_are_those_of_the_recipes() -> None:
    plan = paper.Plan(TABLES["linear-in1k"], "in1k")
    hours = [plan.hours(row) / 4 for row in plan.table.rows]  # on 4 H100, as configs/ has them
    assert [round(value, 1) for value in hours] == [4.4, 15.5, 6.6, 17.7, 3.3, 8.8]


@pytest.mark.parametrize("scale", ["cifar", "tiny100"])
def test_expected_numbers_are_of_these_flags(scale: str) -> None:
    plan = paper.Plan(TABLES["linear-in100"], scale)
    stored = (ROOT / "benchmarks/results" / SCALES[scale].results).read_text()
    for row in plan.table.rows[:4]:
        config = plan.config(row)
        assert len(plan.expected(plan.columns[1], row)) == 2, row.title
        assert f'"epochs": "{config.epochs}"' in stored and config.lr == 0.25
        assert not config.learns_targets or (config.mmnn_optimiser, config.mmnn_shape) == ("sgd", "concave")


def test_flags_that_change_what_is_learnt_make_other_runs() -> None:
    table = TABLES["linear-in100"]
    usual, gpus, shorter = (paper.Plan(table, "cifar", further=tuple(words.split()))
                            for words in ("", "--gpus 4 --workers 2", "--epochs 9"))  # fmt: skip
    row, column = table.rows[0], usual.columns[1]
    assert usual.folder(row, 0) == gpus.folder(row, 0) and usual.expected(column, row) == gpus.expected(column, row)
    assert shorter.folder(row, 0).name == "moco-consistency-none-epochs-9-seed0"
    assert shorter.expected(column, row) == []


def test_an_interval_needs_three_seeds() -> None:
    assert paper.interval([75.82, 75.4]) == "75.8, 75.4" and paper.interval([]) == "-"
    assert paper.interval([75.0, 76.0, 77.0]) == "76.0 [73.5, 78.5]"


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.delitem(AUXILIARIES, "clsa")
    assert paper.main([]) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("time "))
    assert line.split()[1:3] == ["15", "12"] and line.endswith("not available: there is no --auxiliary clsa")
    assert paper.main(["time"]) == 0
    assert "# CLSA, 50 epochs: not available, there is no --auxiliary clsa" in capsys.readouterr().out


def test_numbers_are_found_in_reports() -> None:
    protocol = {"protocol": {"metric": "class-mean"}}
    linear = protocol | {"result": {"top1": 0.5, "class_mean": 0.25}}
    assert paper.number(Column("", "linear --dataset pets"), linear) == 25
    shots = protocol | {"shots": [{"shots": 5, "class_mean": (0.1, 0.3)}, {"shots": 10, "class_mean": (0.5,)}]}
    assert paper.number(Column("", "fewshot --dataset flowers102", "5"), shots) == pytest.approx(20)
    boxes = {"result": {"precision": {"AP": 51.2, "APs": None}}}
    assert paper.number(Column("", "detect --dataset coco", "AP"), boxes) == 51.2
    assert math.isnan(paper.number(Column("", "detect --dataset coco", "APs"), boxes))


def test_hours_are_those_of_all_steps() -> None:
    config = paper.Plan(TABLES["time"], "in1k").config(TABLES["time"].rows[0])
    steps = [{"kind": "train", "step": step, "epoch": 25 * step, "images_per_s": 256 / 3600} for step in (1, 2)]
    knn = {"kind": "knn", "step": 2, "epoch": 50, "accuracy": 0.5}
    assert paper.of_training("hours", [*steps, knn], config) == pytest.approx(2)
    assert paper.of_training("knn", [*steps, knn], config) == 50
    assert math.isnan(paper.of_training("hours", steps[:1], config))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("tmie", "TABLE: tmie is not one of linear-in100"),
        ("time --scale cifar", "--scale cifar: not of this table; use in1k"),
        ("mmnn --run", "--data DATA: no such folder; name that of the images"),
        ("mmnn -- --gpu 1", "unknown flag --gpu; did you mean --gpus?"),
    ],
)
def test_mistakes_are_one_line(words: str, said: str, capsys: Capture) -> None:
    assert paper.main(words.split()) == 2
    line = capsys.readouterr().err
    assert line.startswith("paper: error: ") and said in line and line.count("\n") == 1


def test_a_table_runs_and_is_filled(
    photo_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Capture
) -> None:
    for split in ("train", "test"):
        (tmp_path / split).symlink_to(photo_folder)
    row = Row("MoCo v2", "moco", "--consistency none", (67.04,), "plain")
    monkeypatch.setitem(TABLES, "mmnn", Table("tiny", (), (row,), TABLES["mmnn"].columns))
    tiny = "--backbone test_resnet --stem imagenet --loader torch --gpus 0 --workers 1 --batch-size 8 --queue-size 16"
    tiny += " --key-bn-splits 2 --epochs 2 --knn-every 1 --knn-k 3"
    words = f"mmnn --scale cifar --run --report --data {tmp_path} --output {tmp_path / 'runs'} -- {tiny}".split()
    assert paper.main(words) == 0
    filled = capfd.readouterr().out.splitlines()
    assert not any("MoCo v2: expected" in line for line in filled)  # which is for other flags
    assert any(re.fullmatch(r"\| MoCo v2: ours \| [\d.]+ \| [\d.]+ \|", line) for line in filled)
    paper.execute(paper.Job(("cocor-eval", "--nonsense"), tmp_path))  # what is there is kept
    with pytest.raises(UserError, match=r"cocor-eval --nonsense .* exit code 2; the same"):
        paper.execute(paper.Job(("cocor-eval", "--nonsense"), tmp_path / "not there"))
