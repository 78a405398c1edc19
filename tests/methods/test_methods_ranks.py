"""Test that every method makes the same steps on 1, 2 and 4 ranks, which see the same 8 images."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import timm
import torch
from helpers.method_programs import with_auxiliaries
from helpers.runs import run
from torch import Tensor, nn

from cocor.config.resolve import load
from cocor.methods import METHODS
from cocor.methods.batchnorm import GlobalBatchNorm, synchronise_batch_norm
from loaders.errors import UserError

Results = dict[str, dict[str, dict[str, Tensor]]]  # by precision, method, name


@pytest.fixture(scope="module")
def results(photo_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Results]:
    """What two steps did, by the number of ranks and the method."""
    folder = tmp_path_factory.mktemp("ranks")
    done = run(str(folder), str(photo_folder), program=["-m", "helpers.method_programs"])
    assert done.returncode == 0, done.stderr
    return {ranks: torch.load(folder / f"{ranks}.pt", weights_only=True) for ranks in (1, 2, 4)}


def compared(results: dict[int, Results], precision: str, method: str,
             ranks: int) -> Iterator[tuple[str, Tensor, Tensor]]:  # fmt: skip
    """Name, value on ``ranks`` ranks and on one."""
    one, several = results[1][precision][method], results[ranks][precision][method]
    if ranks == 4:  # one step only
        one, several = ({name: value for name, value in found.items() if name[0] == "0"} for found in (one, several))
    assert one.keys() == several.keys()
    with_mmnn = method in (*METHODS, "cheaper", "abs", "adamw")
    if with_mmnn:
        told = {"loss", "similarity_2", "labelled_loss", "hypergradient_norm", "contrastive_feature_std"}
        told |= {"gradient_contrastive", "gradient_consistency"}
        assert {f"0 {name}" for name in told} <= one.keys()
    assert ("0 similarity_3" in one) == (with_mmnn and method != "cheaper")
    for name, value in one.items():
        own = "key_backbone" in name and ("running" in name or "num_batches" in name)  # of each rank's own images
        own |= " gradient_co" in name  # norms of the parts, before they are averaged over ranks
        if not own:
            yield name, several[name], value


@pytest.mark.parametrize("method", [*METHODS, "cheaper"])  # the last: MoCo with all that takes turns
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_make_the_same_steps(results: dict[int, Results], method: str, ranks: int) -> None:
    for name, several, one in compared(results, "float64", method, ranks):
        torch.testing.assert_close(several, one, rtol=1e-8, atol=1e-10, msg=lambda text, n=name: f"{n}: {text}")
    learned = [value for name, value in results[1]["float64"][method].items() if name.startswith("0 gradient mmnn")]
    assert learned and any(value.abs().max() > 1e-8 for value in learned)


@pytest.mark.parametrize("name", with_auxiliaries())
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_train_the_same_auxiliaries(results: dict[int, Results], name: str, ranks: int) -> None:
    for place, several, one in compared(results, "float64", name, ranks):
        torch.testing.assert_close(several, one, rtol=1e-8, atol=1e-10, msg=lambda text, n=place: f"{n}: {text}")


# Without CoCor; the other loss, measured anew after the step; clipped by the norm over all ranks.
@pytest.mark.parametrize("name", ["plain", "abs", "adamw"])
def test_ranks_make_the_same_other_steps(results: dict[int, Results], name: str) -> None:
    for place, several, one in compared(results, "float64", name, 2):
        torch.testing.assert_close(several, one, rtol=1e-7, atol=1e-9, msg=lambda text, n=place: f"{n}: {text}")
    trained = results[1]["float64"][name]
    assert any(key.startswith("0 gradient method") for key in trained)
    assert name == "plain" or trained["0 hypergradient_norm"] > 1e-6


@pytest.mark.parametrize("method", METHODS)
def test_ranks_round_no_worse_than_one(results: dict[int, Results], method: str) -> None:
    """Rounding: this small network, on 8 images, magnifies it up to 100,000 times on a single rank already."""
    rows: list[tuple[Tensor, Tensor, Tensor]] = []
    for name, several, one in compared(results, "float32", method, 2):
        if name in ("0 loss", "0 contrastive_loss", "0 consistency_loss"):
            torch.testing.assert_close(several, one, rtol=1e-6, atol=1e-6)
        if name.startswith("0 gradient method"):
            rows.append((several.double(), one.double(), results[1]["float64"][method][name]))
    gradients = [torch.cat([value.flatten() for value in column]) for column in zip(*rows, strict=True)]
    several, one, true = (value / gradients[2].norm() for value in gradients)
    assert (several - true).norm() < 1.5 * (one - true).norm() + 1e-5


def test_batch_norm_over_one_rank_is_batch_norm() -> None:
    plain = timm.create_model("test_resnet", num_classes=0).double()
    other = timm.create_model("test_resnet", num_classes=0).double()
    other.load_state_dict(plain.state_dict())
    names = list(other.state_dict())
    other = synchronise_batch_norm(other, torch.device("cpu"))
    assert list(other.state_dict()) == names
    assert any(isinstance(module, GlobalBatchNorm) for module in other.modules())
    images = torch.randn(4, 3, 32, 32, dtype=torch.float64)
    for training in (True, False):
        assert torch.equal(plain.train(training)(images), other.train(training)(images))
    norm = timm.layers.BatchNormAct2d(3)
    converted = synchronise_batch_norm(nn.Sequential(norm), torch.device("cpu"))
    images = torch.randn(4, 3, 5, 5)
    assert torch.equal(converted(images), norm(images)) and converted(images).min() == 0  # timm's activation within


@pytest.mark.parametrize("name", ["test_resnet", "test_efficientnet"])
def test_gpus_use_sync_batch_norm(name: str) -> None:
    plain = timm.create_model(name, num_classes=0).eval()
    names, images = list(plain.state_dict()), torch.randn(2, 3, 32, 32)
    expected = plain(images)
    converted = synchronise_batch_norm(plain, torch.device("cuda"))
    norms = [module for module in converted.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    assert norms and all(isinstance(norm, nn.SyncBatchNorm) for norm in norms)
    assert list(converted.state_dict()) == names and torch.equal(converted(images), expected)


def test_sync_bn_follows_the_method() -> None:
    defaults = {method: load(["--method", method]).sync_bn for method in METHODS}
    assert [method for method, synchronised in defaults.items() if not synchronised] == ["moco", "supcon"]
    assert not load(["--method", "simsiam", "--no-sync-bn"]).sync_bn
    flags = ["--method", "simsiam", "--consistency", "abs", "--gpus", "2"]
    with pytest.raises(UserError, match=r"sync_bn: consistency abs .* --hypergradient taylor"):
        load(flags)
    assert load([*flags, "--no-sync-bn"]).consistency == "abs"
