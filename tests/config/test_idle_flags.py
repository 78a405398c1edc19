"""Test the warnings of flags that cannot act beside the other settings."""

import re
from pathlib import Path

import pytest
from helpers.runs import READMES, ROOT, Capture

from cocor.config.checks import needs, warnings
from cocor.config.options import Config
from cocor.config.resolve import read
from cocor.train import main

# The words of a need that a flag is warned of with, flags that lack what it needs, and flags that have it.
IDLE = [
    ("--data x", "a --loader that reads images", "--loader synthetic", "--loader torch"),
    ("--on-error skip", "a --loader that reads images", "--loader synthetic", ""),
    ("--knn-every 2", "a --loader that reads images", "--loader synthetic", ""),
    ("--synthetic-images 64", "--loader synthetic", "--loader dali", "--loader synthetic"),
    ("--hw-decoder-load 0.5", "--loader dali on GPUs", "--loader ffcv", "--gpus 1"),
    ("--hw-decoder-load 0.5", "--loader dali on GPUs", "--gpus 0", ""),
    ("--val-data x", "--probe-every above 0", "--knn-every 0", "--knn-every 1"),
    ("--knn-k 5", "--knn-every above 0", "--knn-every 0", ""),
    ("--labels x", "--mmnn learned, --method supcon or", "--knn-every 0 --mmnn constants", "--knn-every 0"),
    ("--verify-data", "a --loader that reads images", "--loader synthetic", ""),
    ("--force-data", "--resume", "", "--resume"),
    ("--force-ranks", "--resume", "--no-overwrite", "--resume x.pt"),
    ("--init x", "where no checkpoint is named to --resume", "--resume x.pt", "--resume"),
    ("--queue-size 4096", "--method moco", "--method simsiam", "--method moco"),
    ("--key-bn-splits 4", "--method moco", "--method byol", ""),
    ("--symmetric", "--method moco", "--method simsiam", "--method moco"),
    ("--temperature 0.1", "--method moco|supcon|simclr", "--method intl", "--method simclr"),
    ("--key-momentum 0.9", "--method moco|byol", "--method supcon", "--method byol"),
    ("--embedding-dim 512", "--method moco|supcon|byol|intl|simclr|barlow|vicreg", "--method simsiam", "--method byol"),
    ("--projector-dim 512", "--method simsiam|byol|intl|barlow|vicreg", "--method moco", "--method intl"),
    ("--projector-layers 2", "--method simsiam", "--method byol", "--method simsiam"),
    ("--predictor-dim 512", "--method simsiam|byol", "--method moco", "--method byol"),
    ("--fix-predictor-lr", "--method simsiam", "--method byol", "--method simsiam"),
    ("--whitening-iterations 5", "--method intl", "--method moco", "--method intl"),
    ("--trace-weight 0.1", "--method intl", "--method moco", "--method intl"),
    ("--redundancy-weight 0.1", "--method barlow", "--method vicreg", "--method barlow"),
    ("--variance-weight 9", "--method vicreg", "--method barlow", "--method vicreg"),
    ("--decay-biases", "--optimiser lars", "--weight-decay 0", "--weight-decay 0 --optimiser lars"),
    ("--decay-biases", "--optimiser lars", "--optimiser adamw", ""),
    ("--lengths 1,2", "an --auxiliary of composites", "--consistency none", "--consistency abs"),
    ("--lengths 1,2", "an --auxiliary of composites", "--consistency none --auxiliary augself",
     "--consistency none --auxiliary augself --auxiliary-pairs composites"),
    ("--auxiliary-weight 2", "--auxiliary multiview|", "--auxiliary strongview", "--auxiliary clsa"),
    ("--auxiliary-pairs composites", "--auxiliary augself|equimod", "--auxiliary clsa", "--auxiliary augself"),
    ("--auxiliary-temperature 1", "--auxiliary equimod|stl|hierarchical", "", "--auxiliary equimod --consistency none"),
    ("--looc-kept crop", "--auxiliary looc", "--auxiliary clsa", "--auxiliary looc"),
    ("--renyi-order 3", "--auxiliary renyicl", "--auxiliary clsa", "--auxiliary renyicl"),
    ("--augself-targets blur", "--auxiliary augself", "--auxiliary clsa", "--auxiliary augself"),
    ("--mmnn constants", "--consistency softplus|abs", "--consistency none", ""),
    ("--mmnn-lr 0.1", "--consistency softplus|abs", "--consistency none", ""),
    ("--consistency-beta 4", "--consistency softplus", "--consistency abs", "--consistency softplus"),
    ("--composite-order fixed1", "--lengths above 1", "--lengths 1", "--lengths 1,2"),
    ("--released-originals 3", "--recipe released", "--recipe paper", "--recipe released"),
    ("--hypergradient taylor", "--mmnn learned", "--mmnn constants", "--mmnn learned"),
    ("--mmnn-shape concave", "--mmnn learned", "--mmnn constants", ""),
    ("--mmnn-optimiser sgd", "--mmnn learned", "--mmnn constants", ""),
    ("--mmnn-wait-epochs 1", "--mmnn learned", "--mmnn constants", ""),
    ("--labelled-batch-size 64", "--mmnn learned", "--mmnn constants", ""),
    ("--label-split x", "--mmnn learned", "--mmnn constants", ""),
    ("--label-fraction 0.1", "--label-split", "--label-split x", "--label-split none"),
    ("--hue 0.2", "--jitter-prob above 0", "--jitter-prob 0", "--jitter-prob 0.5"),
    ("--blur-sigma 1,2", "--blur-prob above 0", "--blur-prob 0", "--blur-prob 0,1"),
    ("--max-restarts 3", "several ranks", "--gpus 1", "--gpus 4"),
    ("--max-restarts 3", "several ranks", "--gpus 0", "--gpus 0 --cpu-ranks 2"),
    ("--profile", "without --dry-run", "--dry-run", ""),
]  # fmt: skip


@pytest.mark.parametrize(("given", "where", "lacking", "having"), IDLE, ids=lambda value: value.split("=")[0])
def test_idle_flags_are_warned_of(tmp_path: Path, given: str, where: str, lacking: str, having: str) -> None:
    name, _, value = given.partition(" ")
    said = [line for line in warned([*given.split(), *lacking.split()]) if line.startswith(f"{name} ")]
    assert len(said) == 1 and said[0].startswith(f"{name} has no effect: it acts only ") and where in said[0]
    assert not [line for line in warned([*given.split(), *having.split()]) if line.startswith(f"{name} ")]
    file = tmp_path / "recipe.yaml"
    file.write_text(f"{name.removeprefix('--').replace('-', '_')}: {value or 'true'}\n")
    assert not [line for line in warned(["--config", str(file), *lacking.split()]) if line.startswith(f"{name} ")]


def warned(argv: list[str]) -> list[str]:
    return warnings(*read(argv))


@pytest.mark.parametrize(("rank", "times"), [(None, 1), ("0", 1), ("1", 0)])
def test_it_is_said_once(rank: str | None, times: int, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    main(["--data", "/nowhere", "--mmnn", "constants", "--hypergradient", "taylor"])
    said = "cocor-train: warning: --hypergradient has no effect: it acts only with --mmnn learned"
    assert capsys.readouterr().err.splitlines().count(said) == times


REDUNDANT = [
    "--consistency none --composite-size 0", "--loader synthetic --knn-every 0",
    "--no-force-data --jitter-prob 0 --hue 0", "--mmnn constants --label-split none",
    "--dry-run --overwrite --keep-checkpoints 1",
]  # fmt: skip


def test_every_need_is_tried_and_nothing_else() -> None:
    assert all(any(words in need.where for _, words, *_ in IDLE) for need in needs())
    assert {key for need in needs() for key in need.keys} <= Config.__dataclass_fields__.keys()
    assert not [line for argv in REDUNDANT for line in warned(argv.split())]


@pytest.mark.parametrize("page", [*READMES, *sorted(map(str, ROOT.glob("configs/*.yaml")))])
def test_documented_commands_are_accepted(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    for line in re.findall(r"cocor-train (--[^#`&\n]*)", Path(page).read_text()):
        if "--help" not in line:
            assert not warned([word for word in line.split() if word != "..."])


def test_a_tag_of_the_backbone_is_explained() -> None:
    (said,) = warned(["--backbone", "resnet18.a1_in1k"])
    assert said.endswith("--init timm:resnet18.a1_in1k starts from these weights")
    assert not warned(["--backbone", "resnet18.a1_in1k", "--init", "timm:resnet18.a1_in1k"])
