"""What a user may get wrong in a call of ``cocor-prep``: one line naming flag or file, code 2, and nothing changed."""

import io
import os
import shutil
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from helpers.hostile import refusal, run_train, time_limit

from loaders.prep.cli import main


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs ``cocor-prep`` with the given arguments, which must end with one line; returns it."""

    def run(*arguments: object) -> str:
        capsys.readouterr()
        with time_limit(20):
            assert main([str(argument) for argument in arguments]) == 2
        out, error = capsys.readouterr()
        assert error.startswith("cocor-prep: ") and error.count("\n") == 1 and not out
        return error

    return run


@pytest.fixture
def images(corner_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(corner_folder, tmp_path / "images", ignore=shutil.ignore_patterns(".*")))


class TestFlags:
    @pytest.mark.parametrize(
        ("arguments", "line"),
        [
            ("", "required: COMMAND"),
            ("scna x", "scna is not one of scan, convert, subset, labels, verify, info; did you mean scan?"),
            ("scan", "required: SOURCE"),
            ("scan x --reprot y", "unknown flag --reprot; did you mean --report?"),
            ("subset x y --clases z", "unknown flag --clases; did you mean --classes?"),
            ("convert x y z", "unexpected argument z"),
            ("convert x y --quality 101", "--quality: 101 must be 1 to 100"),
            ("convert x y --quality 9.5", "--quality: 9.5 is not a whole number"),
            ("convert x y --shorter-side", "--shorter-side: expected one argument"),
            ("convert x y --shorter-side 0", "--shorter-side: 0 must be 1 to 65,535"),
            ("convert x y --workers 100000", "--workers: 100000 must be 1 to 1,024"),
            ("scan x --max-pixels 1000000000", "--max-pixels: 1000000000 must be 1 to 178,000,000"),
            ("scan x --on-error ignore", "--on-error: ignore is not one of stop, skip"),
            ("labels x --seed -1", "--seed: -1 must be 0 to 9,223,372,036,854,775,807"),
            ("labels x --seed 9223372036854775808", "--seed: 9223372036854775808 must be 0 to"),
            ("labels x --seed " + "9" * 5000, "9 must be 0 to"),
            *(
                (f"labels x --fraction {wrong}", f"--fraction: {wrong} must be a number above 0 and at most 1")
                for wrong in ("0", "1.5", "-1", "nan")
            ),
            ("labels x --fraction 1e-400", "--fraction: 1e-400 must be a number above 0"),
        ],
    )
    def test_mistakes_are_one_line(self, arguments: str, line: str, refused: Callable[..., str]) -> None:
        assert line in refused(*arguments.split())

    def test_the_largest_seed_works(self, images: Path, tmp_path: Path) -> None:
        seed = str((1 << 63) - 1)
        assert main(["labels", str(images), "--seed", seed, "--output", str(tmp_path / "list")]) == 0


class TestSpecialFiles:
    @pytest.fixture(params=["pipe", "socket", "device", "folder"])
    def make(self, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[str], Path]]:
        """Puts something that is no regular file under a name; yields the maker."""
        sockets = []

        def put(name: str) -> Path:
            path = tmp_path / name
            if request.param == "pipe":
                os.mkfifo(path)
            elif request.param == "socket":
                sockets.append(socket.socket(socket.AF_UNIX))
                sockets[-1].bind(str(path))
            elif request.param == "device":
                path.symlink_to("/dev/zero")
            else:
                path.mkdir()
            return path

        yield put
        for opened in sockets:
            opened.close()

    @pytest.mark.parametrize("name", ["x.tar", "x.beton", "x.parquet", "x.txt"])
    @pytest.mark.parametrize("command", ["scan", "info", "convert"])
    def test_as_a_source(
        self, make: Callable[[str], Path], name: str, command: str, refused: Callable[..., str], tmp_path: Path
    ) -> None:
        source = make(name)
        assert f"{name}: " in refused(command, source, *([tmp_path / "out"] if command == "convert" else []))

    def test_as_a_list(self, make: Callable[[str], Path], images: Path, refused: Callable[..., str]) -> None:
        path = make("list.txt")
        assert "list.txt: " in refused("labels", images, "--check", path)
        assert "list.txt: " in refused("subset", images, images.parent / "out", "--classes", path)
        flat = images / "a"
        assert "list.txt: " in refused("scan", flat, "--labels", path)
        path.with_name("x.beton").symlink_to(path)
        assert "x.beton: " in refused("verify", path.with_name("x.beton"))

    @pytest.mark.parametrize("name", ["x.beton", "x.tar", "x"])
    def test_as_training_data(
        self, make: Callable[[str], Path], name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        line = refusal(capsys, run_train(data=make(name), loader="torch", output=tmp_path / "run"))
        assert f"{name}: " in line

    def test_among_the_training_lists(
        self, make: Callable[[str], Path], images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        path = make("list.txt")
        for flag, data in (("labels", images / "a"), ("label_split", images)):
            options = {"data": data, flag: path, "loader": "torch", "output": tmp_path / "run"}
            assert "list.txt: " in refusal(capsys, run_train(**options))

    def test_in_place_of_the_size_index(self, make: Callable[[str], Path], images: Path) -> None:
        make("images/.cocor-index.npz")
        with time_limit(20):
            assert main(["scan", str(images), "--workers", "1"]) == 0


class TestOutputs:
    @pytest.mark.parametrize(
        "command",
        [
            ["scan", "SOURCE", "--report"],
            ["labels", "SOURCE", "--output"],
            ["info", "SOURCE", "--sheet"],
            ["convert", "SOURCE"],
        ],
        ids=lambda command: command[0],
    )
    def test_never_their_own_source_nor_in_it(
        self, command: list[str], images: Path, tmp_path: Path, refused: Callable[..., str]
    ) -> None:
        beton, linked = tmp_path / "x.beton", tmp_path / "linked"
        assert main(["convert", str(images), str(beton), "--workers", "1"]) == 0
        linked.mkdir()
        (linked / "a").symlink_to(images / "a")
        (tmp_path / "alias").symlink_to(images)
        before = beton.read_bytes(), sorted(images.rglob("[!.]*"))
        for source, output in [
            (images, images),
            (images, images / "new.txt"),
            (images, images / "a" / "new.txt"),
            (images, images / "a" / "0.jpg"),
            (images, tmp_path / "alias" / "b" / "new.txt"),
            (tmp_path / "alias", images / "new.txt"),
            (images / "a", images),
            (linked, images / "a" / "new.txt"),
            (beton, beton),
        ]:
            words = [str(source) if word == "SOURCE" else word for word in command]
            line = refused(*words, output, "--force")
            assert "lies inside its source" in line or "would replace its own source" in line
        assert (beton.read_bytes(), sorted(images.rglob("[!.]*"))) == before

    def test_the_folder_that_one_is_in(
        self, images: Path, tmp_path: Path, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path / "elsewhere")
        assert (
            refused("convert", images, ".")
            == "cocor-prep: . exists; name another output or pass --force to replace it\n"
        )
        assert "would replace its own source" in refused("convert", images, "..")
        monkeypatch.chdir(images)
        assert "would replace its own source" in refused("convert", images, ".")

    def test_a_suffix_in_capitals_is_a_file_as_well(self, images: Path, tmp_path: Path) -> None:
        assert main(["convert", str(images), str(tmp_path / "X.BETON"), "--workers", "1"]) == 0
        assert (tmp_path / "X.BETON").is_file() and main(["verify", str(tmp_path / "X.BETON"), "--workers", "1"]) == 0

    def test_never_the_list_they_were_made_with(
        self, images: Path, tmp_path: Path, refused: Callable[..., str]
    ) -> None:
        labels = tmp_path / "labels.csv"
        labels.write_text("0.jpg,x\n1.jpg,y\n2.jpg,x\n")
        for command in ("labels", "--output"), ("scan", "--report"), ("info", "--sheet"):
            line = refused(command[0], images / "a", "--labels", labels, command[1], labels, "--force")
            assert "labels.csv: the output would replace its own source" in line
        assert labels.read_text().startswith("0.jpg,x")

    def test_force_replaces_only_what_it_could_have_made(
        self, images: Path, tmp_path: Path, refused: Callable[..., str]
    ) -> None:
        mine = tmp_path / "mine"
        mine.mkdir()
        (mine / "thesis.txt").write_text("precious")
        os.mkfifo(tmp_path / "pipe")
        for output in (mine, tmp_path / "pipe"):
            assert "--force replaces files and folders that cocor-prep made" in refused(
                "convert", images, output, "--force"
            )
        assert (mine / "thesis.txt").read_text() == "precious"
        for _ in range(2):
            assert main(["convert", str(images), str(tmp_path / "out"), "--workers", "1", "--force"]) == 0


def test_a_terminal_need_not_know_the_characters_of_a_name(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "日\udcff.beton"
    for command in (["convert", str(images), str(output), "--workers", "1"], ["info", str(output)]):
        terminal = io.TextIOWrapper(io.BytesIO(), "ascii")
        monkeypatch.setattr(sys, "stdout", terminal)
        assert main(command) == 0
        terminal.flush()
        assert rb"\u65e5" in terminal.buffer.getvalue()
