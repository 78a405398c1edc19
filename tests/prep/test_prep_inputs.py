"""What a user may get wrong in a call of ``cocor-prep``: one line naming flag or file, code 2, and nothing changed."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.hostile import refusal, run_train
from helpers.prep_cases import Prep

Make = Callable[[str], Path]


@pytest.fixture
def images(corner_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(corner_folder, tmp_path / "images", ignore=shutil.ignore_patterns(".*")))


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ("", "required: COMMAND"),
        ("scna x", "scna is not one of scan, convert, subset, labels, verify, info; did you mean scan?"),
        ("scan", "required: SOURCE"), ("scan x --reprot y", "unknown flag --reprot; did you mean --report?"),
        ("subset x y --clases z", "unknown flag --clases; did you mean --classes?"),
        ("convert x y z", "unexpected argument z"), ("convert x y --quality 101", "--quality: 101 must be 1 to 100"),
        ("convert x y --quality 9.5", "--quality: 9.5 is not a whole number"),
        ("convert x y --shorter-side", "--shorter-side: expected one argument"),
        ("scan x --on-error ignore", "--on-error: ignore is not one of stop, skip"),
        ("labels x --seed -1", "--seed: -1 must be 0 to 9,223,372,036,854,775,807"),
        ("labels x --fraction 0", "--fraction: 0 must be a number above 0 and at most 1"),
        ("labels x --fraction nan", "--fraction: nan must be a number above 0"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line(arguments: str, line: str, prep: Prep) -> None:
    assert line in prep.refused(*arguments.split())


class TestSpecialFiles:
    @pytest.fixture(params=[os.mkfifo, Path.mkdir, lambda path: path.symlink_to("/dev/zero")])
    def make(self, request: pytest.FixtureRequest, tmp_path: Path) -> Make:
        """Puts a pipe, a folder or a device under a name."""

        def put(name: str) -> Path:
            request.param(tmp_path / name)
            return tmp_path / name

        return put

    @pytest.mark.parametrize("name", ["x.tar", "x.beton", "x.parquet", "x.txt"])
    @pytest.mark.parametrize("command", ["scan", "info", "convert"])
    def test_as_a_source(self, make: Make, name: str, command: str, prep: Prep, tmp_path: Path) -> None:
        assert f"{name}: " in prep.refused(command, make(name), *([tmp_path / "out"] if command == "convert" else []))

    def test_as_a_list(self, make: Make, images: Path, prep: Prep, capsys: pytest.CaptureFixture[str]) -> None:
        path = make("list.txt")
        assert "list.txt: " in prep.refused("labels", images, "--check", path)
        assert "list.txt: " in prep.refused("subset", images, images.parent / "out", "--classes", path)
        assert "list.txt: " in prep.refused("scan", images / "a", "--labels", path)
        path.with_name("x.beton").symlink_to(path)
        assert "x.beton: " in prep.refused("verify", path.with_name("x.beton"))
        for flag, data in (("labels", images / "a"), ("label_split", images)):
            options = {"data": data, flag: path, "loader": "torch", "output": images.parent / "run"}
            assert "list.txt: " in refusal(capsys, run_train(**options))

    @pytest.mark.parametrize("name", ["x.beton", "x.tar", "x"])
    def test_as_training_data(self, make: Make, name: str, capsys: pytest.CaptureFixture[str]) -> None:
        data = make(name)
        assert f"{name}: " in refusal(capsys, run_train(data=data, loader="torch", output=data.with_name("run")))

    def test_in_place_of_the_size_index(self, make: Make, images: Path, prep: Prep) -> None:
        make("images/.cocor-index.npz")
        prep("scan", images)


class TestOutputs:
    @pytest.mark.parametrize("command", ["scan --report", "labels --output", "info --sheet", "convert"])
    def test_never_their_own_source(self, command: str, images: Path, tmp_path: Path, prep: Prep) -> None:
        """Nor in it."""
        beton, linked = tmp_path / "x.beton", tmp_path / "linked"
        prep("convert", images, beton)
        linked.mkdir()
        (linked / "a").symlink_to(images / "a")
        (tmp_path / "alias").symlink_to(images)
        before = beton.read_bytes(), sorted(images.rglob("[!.]*"))
        for source, output in [
            (images, images), (images, images / "new.txt"), (images, images / "a" / "new.txt"),
            (images, images / "a" / "0.jpg"), (images, tmp_path / "alias" / "b" / "new.txt"),
            (tmp_path / "alias", images / "new.txt"), (images / "a", images), (linked, images / "a" / "new.txt"),
            (beton, beton),
        ]:  # fmt: skip
            name, *flag = command.split()
            line = prep.refused(name, source, *flag, output, "--force")
            assert "lies inside its source" in line or "would replace its own source" in line
        assert (beton.read_bytes(), sorted(images.rglob("[!.]*"))) == before

    def test_a_suffix_may_be_in_capitals(self, images: Path, tmp_path: Path, prep: Prep) -> None:
        prep("convert", images, tmp_path / "X.BETON")
        assert (tmp_path / "X.BETON").is_file() and prep("verify", tmp_path / "X.BETON")

    def test_never_the_list_they_were_made_with(self, images: Path, tmp_path: Path, prep: Prep) -> None:
        labels = tmp_path / "labels.csv"
        labels.write_text("0.jpg,x\n1.jpg,y\n2.jpg,x\n")
        for command, flag in ("labels", "--output"), ("scan", "--report"), ("info", "--sheet"):
            line = prep.refused(command, images / "a", "--labels", labels, flag, labels, "--force")
            assert "labels.csv: the output would replace its own source" in line
        assert labels.read_text().startswith("0.jpg,x")

    def test_force_replaces_only_prepared_sets(self, images: Path, tmp_path: Path, prep: Prep) -> None:
        mine = tmp_path / "mine"
        mine.mkdir()
        (mine / "thesis.txt").write_text("precious")
        os.mkfifo(tmp_path / "pipe")
        for output in (mine, tmp_path / "pipe"):
            line = prep.refused("convert", images, output, "--force")
            assert "--force replaces files and folders that cocor-prep made" in line
        assert (mine / "thesis.txt").read_text() == "precious"
        for _ in range(2):
            prep("convert", images, tmp_path / "out", "--force")
