"""A user's mistake: one line on stderr that names it and its remedy, exit code 2, nothing written."""

import errno
import io
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers.runs import ROOT, Capture, flags, run
from PIL import Image

import cocor
from cocor.eval.export.command import main as export
from cocor.train import main
from loaders.errors import explain

Refused = Callable[..., str]


@pytest.fixture
def refused(tmp_path: Path, capsys: Capture) -> Refused:
    """Runs ``cocor-train``, checks how it refuses, and returns what it says after ``cocor-train: error: ``."""
    output = tmp_path / "runs" / "new"

    def start(*arguments: str, **options: object) -> str:
        capsys.readouterr()
        assert main([*arguments, *flags(output=output, **options)]) == 2
        printed = capsys.readouterr()
        (line,) = printed.err.splitlines()
        assert printed.out == "" and line.startswith("cocor-train: error: ")
        assert not output.exists()
        return line.removeprefix("cocor-train: error: ")

    return start


def spoil(path: Path, how: str) -> None:
    content = path.read_bytes()
    path.write_bytes({"truncated": content[: len(content) // 2], "garbage": b"not an image " * 50, "empty": b""}[how])


def assert_said(line: str, words: str) -> None:
    """``words``, parts of a line in their order; a line break marks its end."""
    first, *others = words.split(" ... ")
    assert f"{line}\n".startswith(first) and all(part in line for part in others), line


SPLIT = {"label_split": "split.txt", "data": "photos"}
# Files that are written beside and among the photographs, options, and what is said.
DATA = [
    ({}, {}, "--data: name a folder ... --config configs/demo.yaml"),
    ({}, {"data": "gone"}, "{}/gone: no such folder; check the path\n"),
    ({"images/": ""}, {"data": "images"}, "{}/images: an empty folder; check the path\n"),
    ({"photos/zebra/": ""}, {"data": "photos"}, "{}/photos/zebra: a class folder without images; remove it"),
    ({"photos/coffee/a.pdf": "taken in 2019", "photos/coffee/.hidden.txt": ""}, {"data": "photos"},
     "{}/photos/coffee/a.pdf: not an image of any known kind; remove it"),
    ({}, SPLIT, "{}/split.txt: No such file"),
    ({"split.txt": "astronaut/0.jpg\nastronaut/77.jpg\n"}, SPLIT, "{}/split.txt:2: astronaut/77.jpg is not"),
    ({"split.txt": "rocket/0.jpg\nrocket/3.jpg\n"}, SPLIT, "{}/split.txt: lists images of one class, rocket, "),
    ({"r.yaml": "temprature: 1\n"}, {"config": "r.yaml"},
     "{}/r.yaml: unknown key temprature; did you mean temperature?\n"),
    ({}, {"config": "gone.yaml"}, "--config {}/gone.yaml: No such file or directory\n"),
]  # fmt: skip


@pytest.mark.parametrize(("files", "options", "words"), DATA, ids=str)
def test_mistaken_files_are_named(
    refused: Refused, photo_copy: Path, files: dict[str, str], options: dict[str, str], words: str
) -> None:
    root = photo_copy.parent
    for name, text in files.items():
        (root / name).mkdir() if name.endswith("/") else (root / name).write_text(text)
    assert_said(refused(**{key: root / value for key, value in options.items()}), words.format(root))


@pytest.mark.parametrize("how", ["truncated", "garbage", "empty"])
def test_a_broken_image(refused: Refused, photo_copy: Path, how: str) -> None:
    spoil(photo_copy / "chelsea" / "3.jpg", how)
    line = refused(data=photo_copy)
    assert line.startswith(f"{photo_copy}/chelsea/3.jpg: ") and "; remove it, or " in line
    assert how != "empty" or "3.jpg: an empty file; remove" in line


def test_classes_that_do_not_fit(refused: Refused, photo_folder: Path, photo_copy: Path, tmp_path: Path) -> None:
    line = refused(data=photo_copy / "rocket")
    assert "no labels" in line and f"if it is one class of several, give {photo_copy}" in line
    for place, target in (("one/rocket", photo_copy / "rocket"), ("sets/photos", photo_copy)):
        (tmp_path / place).parent.mkdir()
        (tmp_path / place).symlink_to(target)
    assert "holds one class, rocket, so that its labels say nothing" in refused(data=tmp_path / "one")
    line = refused(data=tmp_path / "sets")
    assert "its only class would be photos" in line and f"give {tmp_path / 'sets' / 'photos'}" in line
    (photo_copy / "rocket").rename(photo_copy / "ship")
    line = refused(data=photo_folder, val_data=photo_copy)
    assert line == f"{photo_copy}: class ship is not among the 4 known classes"


SIZES = {"image_size": 100_000, "queue_size": 10**12, "workers": 10**6, "batch_size": 10**9, "gpus": 10**6,
         "cpu_ranks": 10**6, "projector_dim": 10**9, "embedding_dim": 10**9, "epochs": 10**12,
         "synthetic_images": 10**12, "released_originals": 10**6}  # fmt: skip
HAVE = torch.cuda.device_count()
OPTIONS = [
    *((f"{key}={value}", f"{key}: {value} is too large; the most is ") for key, value in SIZES.items()),
    ("tempreture=0.1", "unknown flag --tempreture; did you mean --temperature?\n"),
    ("batch_size=32 queue_size=64",
     "24 images are fewer than one batch; lower --batch-size (32) or add images\n"),
    ("data=~nobody-of-this-name/images",
     "--data: '~nobody-of-this-name/images' is not a path: there is no such user\n"),
    ("gpus=3", "batch_size: 8 is no multiple of the 3 ranks; try 9\n"),
    ("gpus=0 cpu_ranks=3", "batch_size: 8 is no multiple of the 3 ranks; try 9\n"),
    ("backbone=test_vit image_size=100", "--image-size 100: test_vit cannot take it (Input height (100) should be "
     "divisible by ... use another, such as 160"),
    ("backbone=resnet5O", "--backbone resnet5O: timm has no such model; did you mean resnet50?\n"),
    ("stem=small backbone=test_convnext", "--stem small: test_convnext has no ResNet stem ... use --stem imagenet"),
    (f"queue_size={2**24} embedding_dim={2**16}",  # 4 TiB
     "out of memory: lower the batch size, the number of workers or other sizes ("),
    (f"gpus={HAVE + 4} batch_size={8 * (HAVE + 4)} labelled_batch_size={2 * (HAVE + 4)} queue_size=999",
     f"--gpus {HAVE + 4}: asked for {HAVE + 4}, have {HAVE}; use --gpus "),
    *([] if HAVE else [("gpus=1", "--gpus 1: asked for 1, have 0; use --gpus 0 to train on the CPU\n")]),
]  # fmt: skip


@pytest.mark.parametrize(("options", "words"), OPTIONS)
def test_mistaken_options_are_named(refused: Refused, photo_folder: Path, options: str, words: str) -> None:
    assert_said(refused(**{"data": photo_folder} | dict(pair.split("=") for pair in options.split())), words)


def test_an_image_size_other_than_the_backbones(tmp_path: Path) -> None:
    options = {"output": tmp_path / "run", "loader": "synthetic", "synthetic_images": 8, "consistency": "none"}
    assert main(flags(**options, backbone="vit_tiny_patch16_224", image_size=32, epochs=1)) == 0
    exports = ["--to", "timm", "hub", "--output", str(tmp_path / "exported")]
    assert export([str(tmp_path / "run"), *exports]) == 0
    assert ", img_size=32)" in (tmp_path / "exported" / "run" / "README.md").read_text()


def test_an_output_that_cannot_be_made(photo_folder: Path, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "file").touch()
    assert main(flags(data=photo_folder, output=tmp_path / "file" / "run")) == 2
    told = f"--output {tmp_path / 'file' / 'run'}: {tmp_path / 'file'} is no folder; choose another --output"
    assert capsys.readouterr().err == f"cocor-train: error: {told}\n"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


class TestMachine:
    @pytest.mark.parametrize(
        ("error", "line"),
        [
            (OSError(errno.ENOSPC, "No space left on device", "/x/y"), "/x/y: No space left on device; free some"),
            (OSError(errno.EMFILE, "Too many open files"), "Too many open files; raise the limit of open files (ulim"),
            (OSError(errno.EIO, "Input/output error", b"/x/\xff"), "/x/\\xff: Input/output error; is the disk still"),
            (OSError(errno.ENOMEM, "Cannot allocate memory"), "out of memory: lower the batch size"),
            (OSError(errno.EFBIG, "File too large", "/x"), "/x: File too large; raise the limit"),
            (RuntimeError("name: EMFILE, message: too many open files"), "name: EMFILE, message: too many open files;"),
            (RuntimeError("unable: Too many open files (24)"), "unable: Too many open files (24); raise"),
            (ImportError("libtorch.so: failed to map segment from shared object"), "a library does not fit into m"),
            (RuntimeError("can't start new thread"), "no more threads can be started: lower --workers"),
            (RuntimeError("CUDA driver version is insufficient for CUDA runtime version"),
             "the GPU's driver is too old for the installed PyTorch or DALI: install builds for the CUDA version"),
            (MemoryError(), "out of memory: lower the batch size, the number of workers or other sizes (MemoryError)"),
            (RuntimeError("a bug"), ""),
            (torch.distributed.DistBackendError("recv failed: Resource temporarily unavailable"), ""),
            (KeyError("a bug"), ""),
        ],
    )  # fmt: skip
    def test_lacking_resources_are_one_line(self, error: Exception, line: str) -> None:
        told = explain(error)
        assert told.startswith(line) and bool(told) == bool(line) and len(told.splitlines()) <= 1

    def test_no_dali(self, photo_folder: Path, tmp_path: Path) -> None:
        """In a process that cannot import it, as on a machine without it; the other loaders work there."""
        program = "import sys; sys.modules['nvidia.dali'] = None; import cocor.train; sys.exit(cocor.train.main())"
        result = run(*flags(data=photo_folder, output=tmp_path / "run", loader="dali"), program=["-c", program])
        (line,) = result.stderr.splitlines()
        assert result.returncode == 2 and line.startswith("cocor-train: error: --loader dali needs NVIDIA DALI")
        assert "pip install nvidia-dali-cuda130, or choose another --loader" in line
        assert not (tmp_path / "run").exists()

    def test_a_torchvision_for_another_pytorch(self, tmp_path: Path) -> None:
        (tmp_path / "torchvision").mkdir()
        (tmp_path / "torchvision" / "__init__.py").write_text("raise RuntimeError('operator nms does not exist')")
        program = "from cocor import cli; raise SystemExit(cli.evaluate())"
        result = run("knn", "random:resnet18", program=["-c", program], PYTHONPATH=f"{tmp_path}:{ROOT}")
        assert result.returncode == 2 and "Traceback" not in result.stderr
        line = result.stderr.splitlines()[-1]
        assert f"does not work with torch {torch.__version__.partition('+')[0]}" in line
        assert "(operator nms does not exist); install the pair: pip install torch==" in line
        assert f" torchvision==0.{15 + int(torch.__version__.split('.')[1])}." in line

    def test_a_terminal_that_lacks_a_character(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        terminal, errors = (io.TextIOWrapper(io.BytesIO(), "ascii") for _ in range(2))
        monkeypatch.setattr(sys, "stdout", terminal)
        monkeypatch.setattr(sys, "stderr", errors)
        assert main(["--data", str(tmp_path / "日\udcff"), "--gpus", "0"]) == 2
        print("日", file=terminal)  # as --profile does with the name of its trace
        errors.flush()
        assert rb"\u65e5" in errors.buffer.getvalue()

    def test_help_and_version_do_not_wait_for_pytorch(self) -> None:
        program = """
import sys
from cocor import cli
for command in (cli.train, cli.evaluate, cli.export, cli.plot, cli.prepare):
    for flag in ("--help", "--version"):
        sys.argv = ["cocor", flag]
        try:
            command()
        except SystemExit as end:
            assert not end.code
print("torch" in sys.modules)
"""
        lines = run(program=("-c", program)).stdout.splitlines()
        assert lines[-1] == "False"
        assert {f"cocor-{name} {cocor.__version__}" for name in ("train", "eval", "export", "plot", "prep")} <= {*lines}

    def test_the_command_itself(self, tmp_path: Path) -> None:
        result = run("--data", str(tmp_path / "gone"), "--output", str(tmp_path / "run"), "--gpus", "0")
        assert (result.returncode, result.stdout) == (2, "")
        assert result.stderr == f"cocor-train: error: {tmp_path}/gone: no such folder; check the path\n"
        assert not list(tmp_path.iterdir())


class TestWithoutLabels:
    @pytest.fixture
    def flat(self, photo_folder: Path, tmp_path: Path) -> Path:
        """The photographs in one folder, without classes."""
        folder = tmp_path / "flat"
        folder.mkdir()
        for path in sorted(photo_folder.glob("*/*")):
            (folder / f"{path.parent.name}_{path.name}").symlink_to(path)
        (folder / ".DS_Store").touch()
        return folder

    def test_the_mmnn_asks_for_labels(self, refused: Refused, flat: Path) -> None:
        line = refused(data=flat)
        assert line.startswith(f"{flat}: no labels")
        assert all(remedy in line for remedy in ("--labels FILE", "--mmnn constants", "--consistency none"))

    @pytest.mark.parametrize(
        "options", [{"consistency": "none"}, {"mmnn": "constants"}, {"method": "simsiam", "consistency": "none"}]
    )
    def test_what_needs_none_runs(self, flat: Path, photo_folder: Path, tmp_path: Path, options: dict) -> None:
        output = tmp_path / "run"
        assert main(flags(data=flat, val_data=photo_folder, output=output, epochs=1, loader="torch", **options)) == 0
        log = (output / "log.txt").read_text()
        assert "24 images without labels" in log and "neither k-NN nor a probe is measured" in log

    def test_a_label_file_gives_them(self, flat: Path, photo_folder: Path, tmp_path: Path) -> None:
        labels, output = tmp_path / "labels.txt", tmp_path / "run"
        labels.write_text("".join(f"{p.name} {p.name.split('_')[0]}\n" for p in sorted(flat.glob("*_*.*"))))
        options = {"labels": labels, "val_data": photo_folder, "epochs": 1}
        assert main(flags(data=flat, output=output, **options)) == 0
        assert "24 images in 4 classes, 8 of them with labels for the MMNN" in (output / "log.txt").read_text()


def test_skipped_files_are_named(photo_copy: Path, tmp_path: Path) -> None:
    for number, how in enumerate(["truncated", "garbage"]):
        spoil(photo_copy / "chelsea" / f"{number}.jpg", how)
    output = tmp_path / "run"
    assert main(flags(data=photo_copy, output=output, on_error="skip", epochs=1)) == 0
    log = (output / "log.txt").read_text()
    assert "22 images in 4 classes" in log
    assert "skipped chelsea/0.jpg: truncated" in log and "skipped chelsea/1.jpg: not an image" in log


def test_decoders_print_no_warnings_of_their_own(photo_copy: Path, tmp_path: Path) -> None:
    """Of a broken EXIF block by Pillow, and of a PNG's colour profile by libpng."""
    with Image.open(photo_copy / "chelsea/0.jpg") as image:
        entry = b"\xff\x00\x12\x01\x03\x00\x01\x00\x00\x00\xff\xff\xff\xff"
        image.save(photo_copy / "chelsea/exif.jpg", exif=b"Exif\x00\x00II*\x00\x08\x00\x00\x00" + entry)
        image.save(photo_copy / "chelsea/profile.png", icc_profile=bytes(200))
    done = run(
        *flags(data=photo_copy, output=tmp_path / "run", loader="dali", dry_run=True, batch_size=26, queue_size=26)
    )
    assert done.returncode == 0 and "arning" not in done.stderr, done.stderr
