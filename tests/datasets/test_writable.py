"""What is written at the end is known to be writable at the beginning, and asking leaves nothing behind."""

import os
from pathlib import Path

import pytest

from loaders.errors import UserError
from loaders.files import check_file, check_folder


def test_asking_leaves_nothing(tmp_path: Path) -> None:
    check_folder("--output", tmp_path / "new" / "folder")
    check_file("--json", tmp_path / "new" / "out.json")
    (tmp_path / "old.json").write_text("old")
    check_file("--json", tmp_path / "old.json")
    assert os.listdir(tmp_path) == ["old.json"] and (tmp_path / "old.json").read_text() == "old"  # noqa: PTH208


def test_unwritable_places_are_named_with_flags(tmp_path: Path) -> None:
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
