"""What is written at the end is known to be writable at the beginning, and asking leaves nothing behind."""

import os
import resource
from pathlib import Path

import pytest
from helpers.hostile import limited

from loaders.errors import UserError
from loaders.files import check_file, check_folder, write_text


def test_asking_leaves_nothing(tmp_path: Path) -> None:
    check_folder("--output", tmp_path / "new" / "folder")
    check_file("--json", tmp_path / "new" / "out.json")
    (tmp_path / "old.json").write_text("old")
    check_file("--json", tmp_path / "old.json")
    assert os.listdir(tmp_path) == ["old.json"] and (tmp_path / "old.json").read_text() == "old"  # noqa: PTH208


def test_unwritable_places_are_named_with_the_flag(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(UserError, match=f"--output {file}/run: {file} is no folder; choose another --output"):
        check_folder("--output", file / "run")
    with pytest.raises(UserError, match=f"--json {tmp_path} is a folder; name a file"):
        check_file("--json", tmp_path)
    with pytest.raises(UserError, match=r"--json /proc/x\.json: /proc cannot be written: "):
        check_file("--json", Path("/proc/x.json"))
    with pytest.raises(UserError, match="File name too long"):
        check_folder("--output", tmp_path / ("x" * 300))


def test_the_limit_of_a_files_size_is_named(tmp_path: Path) -> None:
    with limited(resource.RLIMIT_FSIZE, 1024):
        with pytest.raises(UserError, match=r"File too large; raise the limit of a file's size \(ulimit -f\)$"):
            check_file("--json", tmp_path / "out.json")
        with pytest.raises(UserError, match=r"File too large; raise the limit of a file's size \(ulimit -f\)$"):
            write_text(tmp_path / "out.json", "x" * 4096)
    assert not list(tmp_path.iterdir())
