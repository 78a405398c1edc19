"""Test where compiled code is kept for the next run."""

from pathlib import Path

import pytest
from torch._inductor.runtime import cache_dir_utils

from cocor.step.compile import _keep_compiled_code


def kept_in() -> str:
    _keep_compiled_code()
    return str(cache_dir_utils.cache_dir())


def test_compiled_code_has_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the other caches, or where the user wants it."""
    usual, own = cache_dir_utils.default_cache_dir(), str(tmp_path / "cocor" / "compiled")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", usual)  # PyTorch's own, once the compiler is loaded
    assert kept_in() == own
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "mine"))
    assert kept_in() == str(tmp_path / "mine")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", usual)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    (tmp_path / "other" / "cocor").mkdir(parents=True)
    (tmp_path / "other" / "cocor" / "compiled").touch()  # which cannot be written to
    assert kept_in() == usual
