"""Where caches go for a user without a home."""

import os
import stat
import tempfile
from pathlib import Path

import pytest

from loaders.files import user_cache


@pytest.fixture(autouse=True)
def no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container that runs under a number which no user has."""
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)


def test_caches_without_a_home_are_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = user_cache()
    assert folder == tmp_path / f"cocor-{os.getuid()}" / "cache"  # and not in a folder that is called ~
    assert stat.S_IMODE(folder.parent.stat().st_mode) == 0o700


def test_no_temporary_folder_means_no_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    with pytest.raises(OSError, match="Not a directory"):
        user_cache().mkdir(parents=True)
