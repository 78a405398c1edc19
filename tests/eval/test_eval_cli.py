"""The commands from end to end on a few photographs; every mistake is one line and exit code 2."""

import argparse
import json
import shutil
import socket
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
import torch
from helpers.runs import environment
from PIL import Image

from cocor.eval.cli import main
from cocor.eval.datasets.protocols import TRANSFER
from cocor.eval.options import chosen_datasets, data_name
from loaders.errors import UserError
from loaders.prep.convert import convert
from loaders.prep.encode import Settings
from loaders.prep.sources import open_source

Capsys = pytest.CaptureFixture[str]

WEIGHTS = "random:resnet18"


@pytest.fixture(scope="module")
def data(photo_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """root/pets/{train,test}/CLASS/...: 16 and 8 images of 4 classes."""
    root = tmp_path_factory.mktemp("sets")
    for folder in sorted(path for path in photo_folder.iterdir() if path.is_dir()):
        for number, file in enumerate(sorted(folder.iterdir())):
            target = root / "pets" / ("train" if number < 4 else "test") / folder.name
            target.mkdir(parents=True, exist_ok=True)
            (target / file.name).write_bytes(file.read_bytes())
    return root


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


USUAL = ("--gpu", "no", "--workers", "0", "--image-size", "32")


def call(command: str, cache: Path, output: Path, *flags: str, weights: tuple[str, ...] = (WEIGHTS,)) -> int:
    return main([command, *weights, *USUAL, "--cache", str(cache), "--output", str(output), *flags])


def kept(folder: Path, name: str) -> dict:
    """The numbers of a command, once its picture is seen to be one."""
    assert Image.open(folder / f"{name}.png").width > 400
    return json.loads((folder / f"{name}.json").read_text())


def test_linear_knn_fewshot_and_retrieval(data: Path, cache: Path, tmp_path: Path, capsys: Capsys) -> None:
    here = ("--data", str(data / "pets"))
    assert call("linear", cache, tmp_path, *here) == 0
    found = kept(tmp_path, "linear")
    assert found["result"]["classes"] == 4 and len(found["result"]["trials"]) == 45
    assert call("linear", cache, tmp_path, *here, "--probe", "moco", "--learn-from", "features", "--crop", "ten") == 0
    assert json.loads((tmp_path / "linear_moco.json").read_text())["result"]["train"] == 12 * 10 + 4
    assert call("knn", cache, tmp_path, *here, "--k", "1", "3") == 0
    assert [row["k"] for row in kept(tmp_path, "knn")["result"]] == [1, 3]
    assert call("knn", cache, tmp_path, "--data", str(data / "pets" / "test"), "--leave-one-out") == 0
    assert call("fewshot", cache, tmp_path, *here, "--shots", "2", "--tasks", "0", "--seeds", "2") == 0
    assert len(kept(tmp_path, "fewshot")["shots"][0]["top1"]) == 2
    assert call("retrieval", cache, tmp_path, *here, "--queries", "2", "--neighbours", "3") == 0
    assert len(kept(tmp_path, "retrieval")["result"]["rows"][0]["neighbours"]) == 3
    assert "mean per class" in capsys.readouterr().out


def test_several_encoders_side_by_side(data: Path, cache: Path, tmp_path: Path) -> None:
    here, two = ("--data", str(data / "pets")), (WEIGHTS, WEIGHTS)
    assert call("spectrum", cache, tmp_path, *here, weights=two) == 0
    assert [row["name"] for row in kept(tmp_path, "spectrum")["result"]] == [WEIGHTS, f"{WEIGHTS} (2)"]
    assert call("consistency", cache, tmp_path, *here, "--images", "4", weights=two) == 0
    first, second = kept(tmp_path, "consistency")["result"]
    assert first["similarity"] == second["similarity"] and first["images"] == 4


def test_transfer_makes_the_table(data: Path, cache: Path, tmp_path: Path, capsys: Capsys) -> None:
    assert call("transfer", cache, tmp_path, "--datasets", "all", "--root", str(data)) == 0
    rows = (tmp_path / "transfer.csv").read_text().splitlines()
    assert len(rows) == 2 and rows[1].startswith(f"pets,{WEIGHTS},class-mean,")
    table = (tmp_path / "transfer.md").read_text()
    assert "| Oxford-IIIT Pets | class-mean |" in table and "- Not found: CIFAR-10, CIFAR-100, " in table
    assert "Food-101: not found" in capsys.readouterr().out
    assert Image.open(tmp_path / "transfer.png").width > 400


COMMANDS = "linear knn fewshot finetune retrieval neighbours embed consistency invariance spectrum detect transfer"


@pytest.mark.parametrize("command", COMMANDS.split())
def test_help_explains_a_command(command: str, capsys: Capsys) -> None:
    with pytest.raises(SystemExit) as left:
        main([command, "--help"])
    assert left.value.code == 0 and f"usage: cocor-eval {command}" in capsys.readouterr().out


def test_datasets_are_chosen_by_name() -> None:
    assert chosen_datasets(["all"]) == list(TRANSFER) and chosen_datasets(["pets,cars", "pets"]) == ["pets", "cars"]
    with pytest.raises(UserError, match="did you mean food101"):
        chosen_datasets(["food11"])


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """root/pets/{train,test}/only: a single class."""
    folder = tmp_path_factory.mktemp("root") / "pets"
    for split, number in product(("train", "test"), range(4)):
        (folder / split / "only").mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (40, 40), (60 * number, 0, 0)).save(folder / split / "only" / f"{number}.png")
    return folder


@pytest.mark.parametrize(("command", "flags", "message"), [
    ("linear", "--data nowhere", "nowhere: no such folder"),
    ("linear", "--data DATA", "no train folder"),
    ("linear", "", "--data DIR"),
    ("linear", "--dataset petz --root DATA", "did you mean pets"),
    ("linear", "--dataset cars --root DATA", "not found; looked for"),
    ("linear", "--dataset pets", "--root"),
    ("linear", "--data PETS", "none.pth: no such file of weights"),
    ("knn", "--data PETS", "--image-size 32: the encoder refuses it: "),
    ("knn", "--data PETS --k 0", "--k: 0 must be at least 1"),
    ("retrieval", "--data PETS/test/coffee/4.jpg", "one file is one split"),
    ("transfer", "--root nowhere", "--root nowhere"),
    ("transfer", "--root DATA --datasets food101", "none of the 1 data sets is usable there: food101"),
    ("linear", "--data PETS --probe moco --crop ten", "--learn-from features"),
    ("spectrum", "--data PETS --crop ten", "--crop ten: for training images"),
    ("fewshot", "--data PETS --shots 2 --ways 9 --tasks 1", "--tasks 0 leaves tasks out"),
    ("fewshot", "--data PETS --ways 1", "--ways: 1 must be at least 2"),
    ("consistency", "--data PETS --filter bicubic", "as training does"),
    ("linear", "--data PETS --epochs 3", "--epochs: not for --probe lbfgs"),
    ("linear", "--data PETS --gpu maybe", "--gpu: maybe is not one of"),
    ("retrieval", f"--data PETS --seed {2**63}", "--seed: 9223372036854775808 must be 0 to"),
    # What labels and counts tell is told before features are made.
    ("linear", "--data ONE", "all training images are of 1 class"),
    ("transfer", "--root ROOT --datasets pets", "none of the 1 data sets is usable there: pets"),
    ("knn", "--data ONE", "all images of the bank are of 1 class"),
    ("knn", "--data PETS --k 17", "--k 17: the bank holds 16 images; use 16 or fewer"),
    ("knn", "--data PETS --k 125 --crop ten", "--k 125: the bank holds 124 images"),
    ("knn", "--data PETS/test --leave-one-out --k 8", "--k 8: the bank holds 7 images"),
    ("fewshot", "--data ONE", "all training images are of 1 class"),
    ("fewshot", "--data PETS --shots 2 9 --tasks 0", "--shots 9: class astronaut has only 4 images"),
    ("fewshot", "--data PETS --shots 2 --ways 9", "--ways 9: only 4 classes of the test images"),
    ("retrieval", "--data PETS --neighbours 99", "--neighbours 99: the bank holds 12 images"),
    ("knn", "--data PETS --output FILE/below", "--output {FILE}/below: "),
    ("knn", "--data PETS --cache FILE", "--cache {FILE}: "),
])  # fmt: skip
def test_mistakes_are_one_line_before_work(
    command: str, flags: str, message: str, data: Path, one: Path, tmp_path: Path, capsys: Capsys
) -> None:
    file = tmp_path / "file"
    file.write_text("")
    places = {"PETS": data / "pets", "DATA": data, "ONE": one, "ROOT": one.parent, "FILE": file}
    for name, place in places.items():
        flags = flags.replace(name, str(place))
    others = {"none.pth": "none.pth", "--image-size 32": "random:vit_tiny_patch16_224"}
    weights = others.get(message.partition(":")[0], "random:test_resnet")
    assert call(command, tmp_path / "cache", tmp_path, *flags.split(), weights=(weights,)) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("cocor-eval: error: ") and message.replace("{FILE}", str(file)) in last
    assert not any((tmp_path / "cache").glob("*.safetensors"))  # where features are kept


def test_demo_names_the_demos_images(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # no folder is called demo here
    assert call("knn", cache, tmp_path, "--data", "demo", "--k", "1", weights=("random:test_resnet",)) == 0
    assert kept(tmp_path, "knn")["features"]["images"] == 3000


def test_results_go_by_the_users_name(data: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for images, name in (("pets", "pets"), ("pets/test", "pets-test")):
        images = ["--cache", str(cache), "--data", str(data / images)]
        assert main(["spectrum", "random:test_resnet", *USUAL, *images]) == 0
        assert (tmp_path / "eval" / "random-test_resnet" / name / "spectrum.json").is_file()
    for place, name in {"tiny/..": tmp_path.name, "tiny/val.beton": "tiny-val"}.items():
        assert data_name(argparse.Namespace(data=tmp_path / place)) == name


def test_unusable_files_stop_or_are_noted(data: Path, cache: Path, tmp_path: Path, capsys: Capsys) -> None:
    folder = Path(shutil.copytree(data / "pets", tmp_path / "pets"))
    (folder / "test" / "coffee" / "4.jpg").write_bytes(b"rubbish")
    assert call("knn", cache, tmp_path, "--data", str(folder)) == 2
    assert "4.jpg: not an image" in capsys.readouterr().err
    assert call("knn", cache, tmp_path, "--data", str(folder), "--on-error", "skip") == 0
    assert "note: 1 unusable files are left out" in capsys.readouterr().out
    (folder / "test" / "coffee" / "4.jpg").unlink()
    for file in sorted((folder / "test" / "chelsea").iterdir())[1:]:
        file.unlink()
    assert call("knn", cache, tmp_path, "--data", str(folder / "test"), "--leave-one-out", "--k", "1") == 0
    assert "images are the only one of their class" in capsys.readouterr().out


def prepared(data: Path, folder: Path) -> Path:
    folder.mkdir()
    for split in ("train", "test"):
        convert(open_source(data / "pets" / split), folder / f"{split}.beton", "beton", Settings(), workers=1)
    return folder


def test_sgd_learns_from_new_crops(data: Path, cache: Path, tmp_path: Path) -> None:
    here = ("--data", str(data / "pets"), "--probe", "moco", "--epochs", "3", "--batch-size", "6")
    assert call("linear", cache, tmp_path, *here) == 0
    found = json.loads((tmp_path / "linear_moco.json").read_text())
    assert found["result"]["train"] == 16 and found["result"]["views"].startswith("random resized crops")
    assert found["settings"]["steps_at"] == [2, 2] and found["settings"]["epochs"] == 3


def test_prepared_files_equal_their_folders(data: Path, tmp_path: Path) -> None:
    stored, cache = prepared(data, tmp_path / "prepared"), tmp_path / "cache"
    for folder, output in ((data / "pets", tmp_path / "a"), (stored, tmp_path / "b")):
        assert call("knn", cache, output, "--data", str(folder), "--k", "3") == 0
        assert call("retrieval", cache, output, "--data", str(folder), "--neighbours", "3") == 0
    assert kept(tmp_path / "a", "knn")["result"] == kept(tmp_path / "b", "knn")["result"]
    first, second = (kept(tmp_path / folder, "retrieval")["result"] for folder in ("a", "b"))
    assert first["rows"][0]["neighbours"] == second["rows"][0]["neighbours"]
    one = ("--data", str(stored / "test.beton"))
    assert call("spectrum", cache, tmp_path / "b", *one) == 0
    assert call("knn", cache, tmp_path / "b", *one, "--leave-one-out") == 0
    assert call("linear", cache, tmp_path / "b", *one) == 2  # one file is one split


@pytest.mark.gpu
def test_a_full_gpu_is_one_line(data: Path, tmp_path: Path, capsys: Capsys) -> None:
    flags = ["--loader", "torch", "--workers", "0", "--cache", str(tmp_path / "c"), "--output", str(tmp_path)]
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(0.0005)
    try:
        assert main(["knn", WEIGHTS, "--data", str(data / "pets"), "--gpu", "yes", *flags]) == 2
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert "out of memory: lower the batch size" in capsys.readouterr().err.splitlines()[-1]


def one_rank(arguments: list[str], cache: Path, output: Path) -> None:
    assert main([*arguments, "--cache", str(cache), "--output", str(output)]) == 0


def ranks(arguments: list[str], output: Path, cache: Path) -> list[tuple[int, str]]:
    """Exit codes and errors of two ranks of one call."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    place |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    command = [sys.executable, "-m", "cocor.eval.cli", *arguments, "--output", str(output), "--cache", str(cache)]
    started = [
        subprocess.Popen(command, stderr=subprocess.PIPE, text=True,
                         env=environment() | place | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(2)
    ]  # fmt: skip
    errors = [process.communicate(timeout=300)[1] for process in started]
    return [(process.returncode, error) for process, error in zip(started, errors, strict=True)]


def test_two_ranks_give_the_result_of_one(data: Path, tmp_path: Path) -> None:
    here = ["knn", WEIGHTS, "--data", str(data / "pets"), *USUAL, "--batch-size", "5", "--k", "1", "3"]
    first, second = tmp_path / "c1", tmp_path / "c2"
    one_rank(here, first, tmp_path / "one")
    assert [code for code, _ in ranks(here, tmp_path / "two", second)] == [0, 0]
    assert (tmp_path / "two" / "knn.json").read_text() == (tmp_path / "one" / "knn.json").read_text()
    kept = [{path.name: path.read_bytes() for path in cache.glob("*.safetensors")} for cache in (first, second)]
    assert len(kept[0]) == 2 and kept[0] == kept[1]


def test_two_ranks_encode_the_crops_of_one(data: Path, tmp_path: Path) -> None:
    here = ["linear", WEIGHTS, "--data", str(data / "pets"), *USUAL, "--probe", "simsiam", "--epochs", "2"]
    one_rank([*here, "--batch-size", "8"], tmp_path / "c", tmp_path / "one")
    assert [code for code, _ in ranks([*here, "--batch-size", "8"], tmp_path / "two", tmp_path / "c")] == [0, 0]
    one, two = (json.loads((tmp_path / n / "linear_simsiam.json").read_text())["result"] for n in ("one", "two"))
    assert two["train_loss"] == pytest.approx(one["train_loss"], rel=1e-5) and two["top1"] == one["top1"]
