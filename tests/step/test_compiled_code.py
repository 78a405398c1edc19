"""What the compiler has made is kept for the next run."""

from pathlib import Path

import pytest
import torch

from cocor.step.compile import _keep_compiled_code


class TestItsPlace:
    """Once the compiler is loaded, PyTorch has named a place itself."""

    def kept_in(self) -> str:
        _keep_compiled_code()
        return str(torch._inductor.runtime.cache_dir_utils.cache_dir())

    def test_is_kept_beside_the_other_caches(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        from torch._inductor.runtime.cache_dir_utils import default_cache_dir

        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", default_cache_dir())
        assert self.kept_in() == str(tmp_path / "cocor" / "compiled")

    def test_an_unwritable_cache_leaves_pytorchs_default(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        from torch._inductor.runtime.cache_dir_utils import default_cache_dir

        (tmp_path / "cocor").mkdir()
        (tmp_path / "cocor" / "compiled").touch()
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", default_cache_dir())
        assert self.kept_in() == default_cache_dir()

    def test_is_kept_where_the_user_wants_it(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "mine"))
        assert self.kept_in() == str(tmp_path / "mine")

    def test_a_user_without_a_name_can_compile(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """As in a container that runs under any number; older versions of PyTorch then have no default."""

        def fails() -> str:
            raise KeyError("getpwuid(): uid not found: 1234")

        monkeypatch.setattr("torch._inductor.runtime.cache_dir_utils.default_cache_dir", fails)
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "mine"))
        assert self.kept_in() == str(tmp_path / "mine")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
        assert self.kept_in() == str(tmp_path / "cocor" / "compiled")
