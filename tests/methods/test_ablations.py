"""Test that every ablation of the paper is a flag that does what it says."""

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.runs import ROOT
from helpers.steps import WORLD, build, config_for

from cocor.config.options import Config
from cocor.config.resolve import load, resolve
from cocor.data import open_data, training_loader, training_plan
from cocor.models import build_target
from cocor.objective.mmnn import MMNN, Constants
from cocor.train import objective
from loaders.errors import UserError
from loaders.views import ops
from loaders.views.plan import PlannedBatch

CONFIGS = ROOT / "configs"


def drawn(*flags: str, count: int = 400) -> PlannedBatch:
    sizes = np.tile(np.array([[60, 80]], np.int32), (count, 1))
    return training_plan(load([*flags])).draw(0, np.arange(count), sizes)


@pytest.mark.parametrize("pool", ["all", "color", "affine"])
def test_pools_and_lengths(pool: str) -> None:
    composition = drawn("--pool", pool, "--lengths", "2,5,10").composition
    assert (composition.sum(2) == np.array([[2], [5], [10]])).all()
    assert [op for op in ops.BASIC if composition.sum((0, 1))[op]] == list(ops.POOLS[pool])


def test_magnitudes_and_recipes() -> None:
    released = drawn("--magnitudes", "released")
    angles = released.magnitudes[released.codes == ops.Op.ROTATE]
    assert set(np.abs(angles)) == {30.0} and len({*angles}) == 2
    uniform = drawn().magnitudes[drawn().codes == ops.Op.ROTATE]
    assert len({*uniform}) > 100 and np.abs(uniform).max() <= 30
    assert [training_plan(load(["--composite-order", order])).order for order in ops.ORDERS] == list(ops.ORDERS)
    paper, released = (training_plan(load(["--recipe", name])).layout for name in ("paper", "released"))
    assert (paper.originals, paper.crop_of_view) == (1, (0, 1, 2, 2, 2, 2))
    assert (released.originals, released.crop_of_view) == (5, tuple(range(10)))


@pytest.mark.parametrize(("fraction", "images"), [(1.0, 24), (0.5, 12), (0.2, 4)])
def test_label_fractions(photo_folder: Path, fraction: float, images: int) -> None:
    data = open_data(config_for(photo_folder, label_fraction=fraction))
    assert data.labelled is not None
    assert abs(len(data.labelled) - images) <= 4 and set(data.labelled.labels) == {0, 1, 2, 3}


def test_shuffled_labels_are_of_the_same_images(photo_folder: Path) -> None:
    told, shuffled = (
        open_data(config_for(photo_folder, label_fraction=1.0, shuffle_labels=value)).labelled
        for value in (False, True)
    )
    assert told is not None and shuffled is not None and told.paths == shuffled.paths
    assert sorted(told.labels) == sorted(shuffled.labels) and (told.labels != shuffled.labels).any()


def test_identity_composites_are_their_originals(photo_folder: Path) -> None:
    _, pairs = build(config_for(photo_folder, pool="identity"))
    batch, _ = pairs[0]
    assert all(torch.equal(images, batch.original) for images in batch.composites)


def test_targets_and_one_long_length(photo_folder: Path) -> None:
    composition = torch.tensor([[3] + [0] * 13, [1, 1, 1] + [0] * 11])
    learned, constants = (build_target(load(["--mmnn", mode]), WORLD) for mode in ("learned", "constants"))
    assert isinstance(learned, MMNN) and isinstance(constants, Constants)
    assert constants(composition).tolist() == pytest.approx([0.65, 0.65])
    assert build_target(load(["--consistency", "none"]), WORLD) is None
    chosen = build_target(load(["--mmnn", "constants", "--constants", "0.9,0.5"]), WORLD)
    assert chosen is not None and chosen(composition).tolist() == pytest.approx([0.1, 0.1])
    none = build_target(load(["--mmnn", "none"]), WORLD)
    assert none is not None and none(composition).tolist() == [1.0, 1.0]
    step, pairs = build(config_for(photo_folder, lengths=(10,)))
    metrics = step(*pairs[0], 0)
    assert {"similarity_10", "target_10"} <= metrics.keys() and "similarity_1" not in metrics


def test_views_may_differ_from_each_other() -> None:
    plan = training_plan(load(["--method", "byol"]))
    assert [view.blur_prob for view in plan.contrastive] == [1.0, 0.1]
    assert [view.solarize_prob for view in plan.contrastive] == [0.0, 0.2]
    assert [view.crop_scale for view in plan.contrastive] == [(0.08, 1.0)] * 2
    with pytest.raises(UserError, match=r"blur_prob: .* one for each of the 2 views"):
        load(["--blur-prob", "0,1,0"])


SETTINGS: dict[str, dict[str, Any]] = {
    "moco": {"lr": 0.03, "temperature": 0.2, "key_momentum": 0.999, "optimiser": "sgd", "final_lr": 0.0},
    "simsiam": {"lr": 0.05, "constants": (0.75, 0.7, 0.6), "projector_dim": 2048, "fix_predictor_lr": True,
                "sync_bn": True},
    "supcon": {"lr": 0.03, "epochs": 100, "temperature": 0.07, "embedding_dim": 128, "blur_prob": (0.0,)},
    "byol": {"lr": 0.3, "optimiser": "lars", "weight_decay": 1e-6, "key_momentum": 0.99, "warmup_epochs": 10},
    "intl": {"lr": 0.5, "weight_decay": 1e-5, "embedding_dim": 8192, "warmup_epochs": 2, "final_lr": 1e-3},
    "simclr": {"lr": 0.3, "optimiser": "lars", "weight_decay": 1e-6, "temperature": 0.1, "brightness": 0.8,
               "sync_bn": True},
    "barlow": {"lr": 0.2, "optimiser": "lars", "final_lr": 1e-3, "redundancy_weight": 0.0051, "sync_bn": True},
    "vicreg": {"lr": 0.2, "optimiser": "lars", "final_lr": 1e-3, "projector_dim": 8192, "variance_weight": 25.0,
               "sync_bn": True},
}  # fmt: skip


class TestAuthorsSettings:
    @pytest.mark.parametrize("method", SETTINGS)
    def test_they_are_the_defaults_and_flags_win(self, method: str, tmp_path: Path) -> None:
        config, settings = load(["--method", method]), SETTINGS[method]
        assert {key: getattr(config, key) for key in settings} == settings
        assert load(["--method", method, "--lr", "0.7", "--optimiser", "sgd"]).lr == 0.7
        (tmp_path / "mine.yaml").write_text(f"method: {method}\noptimiser: sgd\nweight_decay: 5e-4\n")
        config = load(["--config", str(tmp_path / "mine.yaml")])
        assert (config.optimiser, config.weight_decay, config.lr) == ("sgd", 5e-4, settings["lr"])

    def test_adamw_has_a_rate_of_its_own(self) -> None:
        config, other = load(["--optimiser", "adamw"]), load(["--method", "byol", "--optimiser", "adamw", "--lr", "1"])
        assert (config.lr, config.weight_decay) == (1.5e-4, 0.1) and (other.lr, other.weight_decay) == (1.0, 0.1)

    def test_recipes_pin_paper_loss(self) -> None:
        def loss(*words: str) -> tuple[float, float, float]:
            config = load(words)
            return config.consistency_beta, config.consistency_weight, config.mmnn_lr

        assert loss("--method", "moco") == (8, 10, 1e-3) and loss("--method", "simsiam") == (8, 3, 1e-3)
        assert {loss("--method", name) for name in ("supcon", "byol", "intl", "barlow")} == {(1, 1, 1e-3)}
        rows = [path for path in CONFIGS.glob("*.yaml") if "_in1" in path.name]
        assert len(rows) == 13 and {loss("--config", str(path)) for path in rows} == {(1, 1, 1e-3)}
        for data in ("cifar10", "tiny100"):
            assert loss("--config", str(CONFIGS / f"{data}_moco.yaml")) == (8, 10, 1e-3)
            assert loss("--config", str(CONFIGS / f"{data}_simsiam.yaml")) == (8, 3, 1e-3)

    @pytest.mark.parametrize("method", ["moco", "byol"])
    def test_a_preset_is_under_files_and_flags(self, method: str, tmp_path: Path) -> None:
        paper, tuned = (load(["--method", method, "--preset", name]) for name in ("paper", "tuned"))
        assert (paper.consistency_weight, paper.consistency_beta) == (1, 1) and tuned == load(["--method", method])
        assert "(preset paper: softplus, weight 1, beta 1, learned targets)" in objective(paper)
        assert ("preset paper" if method == "byol" else "preset tuned") in objective(replace(tuned, preset="paper"))
        (tmp_path / "mine.yaml").write_text("preset: paper\nconsistency_beta: 3\n")
        own = load(["--config", str(tmp_path / "mine.yaml"), "--consistency-weight", "7", "--mmnn", "none"])
        assert objective(own) == "moco + CoCor (preset of its own: softplus, weight 7, beta 3, no targets)"
        words = "preset of its own: softplus of the printed sign, weight 1, beta 1, learned targets"
        assert words in objective(replace(paper, consistency_sign="printed"))

    def test_sgd_of_the_mmnn_has_the_rates_of_before(self) -> None:
        def rate(*words: str) -> float:
            return load(["--mmnn-optimiser", "sgd", *words]).mmnn_lr

        assert rate("--method", "moco") == rate("--method", "simsiam") == 0.5
        assert rate("--method", "byol") == 0.05 and rate("--mmnn-lr", "2") == 2.0

    def test_short_runs_warm_up_less(self) -> None:
        def start(*words: str) -> tuple[int, int]:
            config = load(words)
            return config.mmnn_wait_epochs, config.mmnn_warmup_epochs

        assert [start("--epochs", str(n)) for n in (200, 6, 5, 1)] == [(3, 2), (3, 2), (0, 0), (0, 0)]
        assert start("--epochs", "5", "--mmnn-wait-epochs", "1") == (1, 2)
        assert start("--epochs", "5", "--mmnn-wait-epochs", "4") == (4, 0)
        for values in ({"epochs": 5, "mmnn_wait_epochs": 5}, {"epochs": 2, "mmnn_warmup_epochs": 2}):
            with pytest.raises(UserError, match=r"leave nothing of [25] epochs; lower them, raise epochs, or use"):
                resolve(values)
            assert resolve(values | {"mmnn": "constants"}) and resolve(values | {"consistency": "none"})
        assert [load(["--method", "byol", "--epochs", str(n)]).warmup_epochs for n in (300, 50, 5)] == [10, 5, 0]
        assert load(["--method", "byol", "--epochs", "50", "--warmup-epochs", "8"]).warmup_epochs == 8


def test_supcon_sees_every_label(photo_folder: Path, photo_copy: Path) -> None:
    config = config_for(photo_folder, method="supcon", consistency="none")
    data = open_data(config)
    with closing(training_loader(config, data, WORLD, torch.float64)) as loader:
        batch = next(iter(loader.epoch(0)))
    assert batch.label.tolist() == data.train.labels[batch.index.numpy()].tolist()
    flat = photo_copy / "rocket"
    with pytest.raises(UserError, match="6 of 6 images have no label, which --method supcon needs; pass --labels FILE"):
        open_data(Config(data=flat, method="supcon", loader="torch", consistency="none"))
