"""Test that the files in configs/ load, say what they reproduce and cost, and make steps."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers.runs import ROOT, Capture

from cocor.backbone import build_backbone
from cocor.config.resolve import load
from cocor.train import main

CONFIGS = ROOT / "configs"
FILES = sorted(CONFIGS.glob("*.yaml"))
OF_THE_PAPER = [file for file in FILES if "in100" in file.stem or "in1k" in file.stem]

# Every row of the paper's tables and figures that is a training: file, flags, and what the flags must come to.
ROWS: list[Any] = [
    *[(f"{m}_{d}", "", {"method": m}) for m in ("moco", "simsiam", "supcon") for d in ("in1k", "in100")],
    *[(f"{m}_in100", "", {"method": m}) for m in ("byol", "intl")],
    *[("moco_in1k", f"--epochs {n}", {"epochs": n}) for n in (50, 100, 200)],
    *[("simsiam_in1k", f"--epochs {n}", {"epochs": n}) for n in (50, 100, 200)],
    *[(f"{m}_in100", "--mmnn constants", {"mmnn": "constants"}) for m in ("moco", "simsiam")],
    *[("moco_in100", f"--composite-order {o}", {"composite_order": o, "epochs": 200}) for o in ("fixed1", "fixed2")],
    ("simsiam_in100_r34", "", {"backbone": "resnet34", "epochs": 200}),
    *[("simsiam_in100_pools", f"--pool {p}", {"pool": p, "epochs": 500}) for p in ("color", "affine", "all")],
    *[("simsiam_in100_labels", f"--label-fraction {f}", {"label_fraction": f}) for f in (1.0, 0.1, 0.01, 0.001)],
    *[
        (f"{m}_in100_lengths", f"--lengths {n}", {"lengths": (n,), "epochs": 50})
        for m in ("moco", "simsiam")
        for n in (1, 2, 3, 4, 5, 10)
    ],
    ("moco_in100_lengths", "--mmnn constants --lengths 2 --constants 0.75", {"constants": (0.75,), "lengths": (2,)}),
]
# And the methods alone: with the flags that say something without CoCor.
ALONE = [
    (file, f"{flags} --consistency none", settings | {"consistency": "none"})
    for file, flags, settings in (*ROWS, *((file.stem, "", {}) for file in OF_THE_PAPER))
    if not flags or flags.startswith("--epochs")
]


@pytest.mark.parametrize(("file", "flags", "settings"), ROWS + ALONE, ids=lambda value: str(value) if value else "")
def test_every_row_of_the_paper_is_a_file(file: str, flags: str, settings: dict[str, object]) -> None:
    config = load(["--config", str(CONFIGS / f"{file}.yaml"), *flags.split()])
    assert {key: getattr(config, key) for key in settings} == settings
    assert (config.batch_size, config.recipe) == (256, "paper")
    assert (config.consistency_beta, config.consistency_weight, config.mmnn_lr) == (1.0, 1.0, 1e-3)


@pytest.mark.parametrize("file", OF_THE_PAPER, ids=lambda file: file.stem)
def test_headers_say_result_and_cost(file: Path) -> None:
    header = " ".join(line[1:].strip() for line in file.read_text().splitlines() if line.startswith("#"))
    assert re.search(r"Paper, linear evaluation on ImageNet-\w+, top-1", header)
    assert re.search(r"Projected on 4 H100.* hours", header) and "moco_in1k.yaml" in header + file.name
    assert f"cocor-train --config configs/{file.name}" in header


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_recipe_makes_steps(file: Path, tmp_path: Path, capsys: Capture) -> None:
    """With a network, a queue and images of a size for tests."""
    small = {"backbone": "test_resnet", "stem": "imagenet", "image_size": 32, "batch_size": 8, "queue_size": 32}
    small |= {"key_bn_splits": 2, "embedding_dim": 16, "projector_dim": 16, "predictor_dim": 8}
    recipe = tmp_path / "small.yaml"
    recipe.write_text(yaml.safe_dump({"defaults": str(file), **small}))
    flags = "--loader synthetic --synthetic-images 32 --gpus 0 --dry-run"
    assert main(["--config", str(recipe), *flags.split()]) == 0
    assert load(["--config", str(file)]).output == Path("runs") / file.stem and file.read_text().startswith("# ")
    assert "loss after 2 steps: " in capsys.readouterr().out


def test_the_vit_of_its_recipe_trains(tmp_path: Path, capsys: Capture) -> None:
    """The network itself, on a small batch: 64 patches of 4 pixels and a class token."""
    small = "--loader synthetic --synthetic-images 16 --gpus 0 --dry-run --batch-size 4 --labelled-batch-size 4"
    assert main(["--config", str(CONFIGS / "cifar10_vit.yaml"), *small.split(), "--queue-size", "32"]) == 0
    shown = capsys.readouterr().out
    assert "loss after 2 steps: " in shown and "vit_tiny_patch16_224" in shown
    config = load(["--config", str(CONFIGS / "cifar10_vit.yaml")])
    network = build_backbone(config.backbone, config.stem, config.image_size)
    assert dict(network.named_parameters())["pos_embed"].shape == (1, 65, 192)
