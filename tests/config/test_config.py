"""Test that options are strictly typed, merged in the documented order, and that mistakes are named."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from cocor.config.checks import check_ranks
from cocor.config.options import Config, labelled_batch_size
from cocor.config.resolve import load
from cocor.methods.moco import key_bn_groups
from loaders.channels import IMAGENET_MEAN, IMAGENET_STD
from loaders.errors import UserError


def written(folder: Path, text: str, name: str = "recipe.yaml") -> str:
    path = folder / name
    path.write_text(text)
    return str(path)


def complaint(*argv: str) -> str:
    with pytest.raises(UserError) as error:
        load(argv)
    message = str(error.value)
    assert "\n" not in message
    return message


def test_flags_override_files_and_these_defaults(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    written(tmp_path, "epochs: 7\nseed: 3\nlr: 0.5\n", "base.yaml")
    file = written(tmp_path / "sub", "defaults: ../base.yaml\nseed: 4\n")
    config = load(["--config", file])
    assert (config.epochs, config.seed) == (7, 4)
    config = load(["--config", file, "--epochs", "9"])
    assert (config.epochs, config.lr, config.momentum) == (9, 0.5, 0.9)
    written(tmp_path, "defaults: b.yaml\n", "a.yaml")
    file = written(tmp_path, "defaults: a.yaml\n", "b.yaml")
    assert "b.yaml -> a.yaml -> b.yaml" in complaint("--config", file)


@pytest.mark.parametrize(("text", "value"), [("1e-3", 1e-3), ("5", 5.0), (".25", 0.25), ("'1e-2'", 0.01)])
def test_numbers_in_yaml(tmp_path: Path, text: str, value: float) -> None:
    lr = load(["--config", written(tmp_path, f"lr: {text}\n")]).lr
    assert isinstance(lr, float) and lr == value


def test_whole_numbers(tmp_path: Path) -> None:
    epochs = load(["--epochs", "1e2"]).epochs
    assert isinstance(epochs, int) and epochs == 100
    assert load(["--seed", str(2**63 - 1)]).seed == 2**63 - 1
    assert complaint("--epochs", "1.5").startswith("--epochs: '1.5' is not a whole number")
    assert load(["--config", str(written(tmp_path, "epochs: 010\n"))]).epochs == 10
    for text in ("0x10", "1:30", "0b11"):
        assert f"epochs: {text!r} is not a whole number" in complaint(
            "--config", written(tmp_path, f"epochs: {text}\n")
        )


@pytest.mark.parametrize("name", ["2024_01_02", "2024-01-02", "010", "1.10", "12:30", "0x1F", "1e3", "1_000", "7"])
def test_names_made_of_digits_stay(tmp_path: Path, name: str) -> None:
    config = load(["--config", str(written(tmp_path, f"data: {name}\noutput: {name}\n"))])
    assert (str(config.data), str(config.output)) == (name, name)


@pytest.mark.parametrize("argv", ["--overwrite", "--overwrite true", "--overwrite=True"])
def test_flags_are_true_or_false(tmp_path: Path, argv: str) -> None:
    assert load(argv.split()).overwrite is True
    for off in ("", "--overwrite False", "--overwrite=no", "--overwrite --no-overwrite"):
        assert load(off.split()).overwrite is False
    assert complaint("--overwrite", "maybe") == "--overwrite: 'maybe' is not true or false"
    assert "overwrite: '2' is not true or false" in complaint("--config", written(tmp_path, "overwrite: 2\n"))


@pytest.mark.parametrize(
    ("flags", "mean", "std"),
    [("", IMAGENET_MEAN, IMAGENET_STD), ("--mean 0.5 --std 0.2", (0.5,) * 3, (0.2,) * 3),
     ("--in-chans 1", (0.449,), (0.226,)), ("--in-chans 1 --std 0.2", (0.449,), (0.2,))],
)  # fmt: skip
def test_there_is_a_mean_for_every_channel(flags: str, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
    config = load(flags.split())
    assert (config.mean, config.std) == (mean, std)


FLAGS = [  # and parts of what is said
    ("--epohcs 3", "--epohcs|did you mean --epochs"),
    ("--batch_size 3", "--batch_size|did you mean --batch-size"),
    ("--epoch 3", "--epoch|did you mean --epochs"),  # no silent abbreviations
    ("train", "unexpected argument train"),
    ("--epochs", "--epochs|expected one argument"),
    ("--method moko", "--method|'moko'|one of moco, simsiam|did you mean moco"),
    ("--lr fast", "--lr|'fast'|a number"), ("--lr nan", "--lr|finite"),
    ("--lengths 1,x", "--lengths|'x'|a whole number"), ("--lengths=", "--lengths"),
    ("--blur-sigma 1", "--blur-sigma|2 values"), ("--data=", "--data"),
    ("--temperature 0", "temperature|too small"),
    ("--lengths 0,1", "lengths|0 is too small"), ("--lengths 11", "lengths|11 is too large"),
    ("--lengths 1,1", "lengths|twice"),
    ("--label-fraction 0", "label_fraction|use --mmnn constants"),
    ("--label-fraction -0.1 --mmnn constants", "label_fraction|too small"),
    ("--label-fraction 1.5", "label_fraction|too large"), ("--queue-size 128", "queue_size|256"),
    ("--batch-size 254 --gpus 4", "batch_size|254|4 ranks|try 256"),
    ("--batch-size 4 --gpus 4", "batch_size|BatchNorm"), ("--batch-size 10", "key_bn_splits|try 5"),
    ("--lengths-per-step 4", "lengths_per_step: 4 is more than there are in --lengths 1,2,3"),
    ("--lengths-per-step -1", "lengths_per_step: -1 is too small; the least is 0"),
    ("--composite-size 225", "composite_size: 225 is no size between 14 and the 224 of --image-size"),
    ("--composite-size 13", "composite_size: 13 is no size between 14 and the 224 of --image-size"),
    ("--in-chans 4", "in_chans: 4: a view has three planes of 8 bits; write three bands of the images as RGB"),
    ("--mean 0.5,0.4", "mean: 0.5,0.4 and std: 0.229,0.224,0.225 must have one value each|each of --in-chans 3"),
    ("--in-chans 1 --mean 0.4,0.4,0.4", "mean: 0.4,0.4,0.4 and std: 0.226 must|--in-chans 1"),
    ("--mean 128", "mean: 128.0 is too large; the most is 1"), ("--std 0", "std: 0.0 is too small; the least is 0.001"),
    ("--mmnn-every 0", "mmnn_every: 0 is too small; the least is 1"),
    ("--warmup-epochs 200", "warmup_epochs: 200 leaves nothing of 200 epochs; lower it or raise epochs"),
    ("--consistency-sign printed --mmnn none", "--consistency-sign printed|leave it out with --consistency abs"),
    ("--consistency-sign printed --consistency abs", "--consistency-sign printed"),
    ("--constants 0.5,0.6", "constants|fall"), ("--constants -0.3,-0.1", "constants|fall"),
    ("--lr -1e-3", "lr: -0.001 is too small; the least is 0"), ("--blur-sigma 2,1", "blur_sigma"),
    ("--overwrite --resume", "--overwrite|--resume"), ("--cpu-ranks 2 --gpus 1", "--cpu-ranks|--gpus 0"),
    ("--config nowhere.yaml", "nowhere.yaml|No such file"),
]  # fmt: skip


@pytest.mark.parametrize(("argv", "parts"), FLAGS)
def test_mistaken_flags_are_named(argv: str, parts: str) -> None:
    message = complaint(*argv.split())
    assert all(part in message for part in parts.split("|")), message


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("learning_rate: 1\n", ["unknown key learning_rate"]),
        ("batch-size: 8\n", ["unknown key batch-size", "did you mean batch_size"]),
        ("3: 8\n", ["unknown key 3"]),
        ("lr: 1\nlr: 2\n", ["lr", "twice"]),
        ("lr: [1, 2]\n", ["lr", "['1', '2']", "a number"]),
        ("lr: true\n", ["lr", "true", "a number"]),
        ("lr:\n", ["lr", "None", "a number"]),
        ("method: 3\n", ["method", "one of moco, simsiam"]),
        ("data: [a]\n", ["data", "a text"]),
        ("lengths: [1, [2]]\n", ["lengths", "['2']", "a whole number"]),
        ("- 3\n", ["key: value"]),
        ("lr: [1\n", ["not YAML", "line 2"]),
        ("<<: {lr: 1}\n", ["unknown key <<"]),
        ("overwrite: !!bool maybe\n", ["overwrite", "maybe", "true or false"]),
        ("lr: !!python/object/apply:os.system ['true']\n", ["lr", "['true']", "a number"]),
        ("defaults: nowhere.yaml\n", ["nowhere.yaml (defaults: of ", "No such file"]),
    ],
)
def test_mistakes_in_files_are_named(tmp_path: Path, text: str, parts: list[str]) -> None:
    message = complaint("--config", written(tmp_path, text))
    assert all(part in message for part in ["recipe.yaml" if "nowhere" not in text else "nowhere", *parts]), message


def test_values_that_mean_more_than_they_say(tmp_path: Path) -> None:
    assert load(["--lengths", "1, 3,5"]).lengths == (1, 3, 5)
    assert load(["--config", written(tmp_path, "lengths: [1, 3, 5]\n")]).lengths == (1, 3, 5)
    assert load(["--config", written(tmp_path, "lengths: 2\n")]).lengths == (2,)
    for flags in ("--mmnn constants", "--consistency none", "--label-split labels.txt"):  # where none is drawn
        assert load([*flags.split(), "--label-fraction", "0"]).label_fraction == 0
    assert load([]).resume is None
    assert load(["--resume"]).resume == load(["--resume", "--epochs", "3"]).resume == "auto"
    assert load(["--resume", "x.pt"]).resume == "x.pt"
    assert load(["--config", written(tmp_path, "", "mine.yaml")]).output == Path("runs/mine")
    assert load(["--consistency", "none"]).output == Path("runs/moco")
    assert load([]).output == Path("runs/moco_cocor")


def test_a_saved_configuration_reads_back(tmp_path: Path) -> None:
    config = load(["--data", "somewhere", "--gpus", "0", "--lengths", "2,4", "--weight-decay", "1e-5", "--resume"])
    config.save(tmp_path / "config.yaml", "two\nlines")
    assert (tmp_path / "config.yaml").read_text().startswith("# two\n# lines\n")
    assert load(["--config", str(tmp_path / "config.yaml")]) == replace(config, resume=None)
    assert yaml.safe_load(yaml.safe_dump(config.to_dict())) == config.to_dict()


def test_help_is_quick_grouped_and_complete() -> None:
    code = "import sys, cocor.config.resolve as c; sys.modules.get('torch') and sys.exit(3); c.load(['--help'])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 0 and not run.stderr
    flags = ["--" + name.replace("_", "-") for name in Config.__dataclass_fields__]
    assert all(flag in run.stdout for flag in flags)
    assert "reports and checkpoints:" in run.stdout
    assert "(default: 0.03; simsiam: 0.05; byol: 0.3; intl: 0.5; simclr: 0.3; barlow: 0.2; vicreg: 0.2)" in " ".join(
        run.stdout.split()
    )


def test_batches_are_shared_out_among_the_ranks() -> None:
    config = load(["--gpus", "4"])
    assert labelled_batch_size(config, 4) == 64
    assert labelled_batch_size(replace(config, batch_size=36, labelled_batch_size=0), 4) == 8
    assert [key_bn_groups(config.key_bn_splits, ranks) for ranks in (1, 2, 8, 16)] == [8, 4, 1, 1]
    with pytest.raises(UserError, match="labelled_batch_size: 6 is no multiple of the 4 ranks; try 8"):
        check_ranks(replace(config, labelled_batch_size=6), 4)


def test_variables_in_paths_of_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCRATCH", "/mnt/fast")
    monkeypatch.delenv("ELSEWHERE", raising=False)
    text = "data: $SCRATCH/images\noutput: ${SCRATCH}/run\nval_data: $ELSEWHERE/images\nbackbone: resnet18\n"
    config = load(["--config", written(tmp_path, text)])
    assert (config.data, config.output) == (Path("/mnt/fast/images"), Path("/mnt/fast/run"))
    assert config.val_data == Path("$ELSEWHERE/images")
    assert load(["--data", "$SCRATCH/images"]).data == Path("$SCRATCH/images")  # quoted, as one of that name must be
    written(tmp_path, "seed: 3\n", "base.yaml")
    monkeypatch.setenv("SCRATCH", str(tmp_path))
    (tmp_path / "sub").mkdir()
    assert load(["--config", written(tmp_path / "sub", "defaults: $SCRATCH/base.yaml\n")]).seed == 3
