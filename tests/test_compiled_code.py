"""What the compiler has made is kept for the next run, and does not fill the disk in the course of years."""

import logging
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from cocor import compiled_code
from cocor.config.options import Config

DAY = 24 * 3600.0


@pytest.fixture(autouse=True)
def let_go() -> None:
    """What earlier tests have used is used no more."""
    while compiled_code._held:
        os.close(compiled_code._held.pop())


class TestItsPlace:
    """Once the compiler is loaded, PyTorch has named a place itself."""

    def kept_in(self) -> str:
        compiled_code.keep(Config())
        return str(torch._inductor.runtime.cache_dir_utils.cache_dir())

    def test_is_kept_beside_the_other_caches(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        from torch._inductor.runtime.cache_dir_utils import default_cache_dir

        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", default_cache_dir())
        folder = Path(self.kept_in())
        assert folder.parent == tmp_path / "cocor" / "compiled"
        assert re.fullmatch(r"torch-[\w.+-]+-resnet50-224px-256", folder.name)

    def test_is_left_to_pytorch_where_ours_cannot_be_made(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
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
        assert Path(self.kept_in()).parent == tmp_path / "cocor" / "compiled"


class TestItsSize:
    @pytest.fixture
    def kept(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, float, int], Path]:
        """Makes a folder of compiled code, last used so many days ago, of so many KiB. Ten KiB are the limit."""
        monkeypatch.setattr(compiled_code, "LIMIT", 10 << 10)
        for limit in ("_LOOKING", "_REMOVING"):  # a machine that is busy with other tests is slow
            monkeypatch.setattr(compiled_code, limit, 60.0)

        def make(name: str, days: float, size: int) -> Path:
            place = tmp_path / name
            (place / "fxgraph" / "ab").mkdir(parents=True)
            (place / "fxgraph" / "ab" / "code").write_bytes(os.urandom(size << 10))
            (place / "used").touch()
            then = time.time() - days * DAY
            os.utime(place / "used", (then, then))
            return place

        return make

    def left(self, folder: Path) -> list[str]:
        compiled_code.prune(folder)
        return sorted(path.name for path in folder.iterdir())

    def test_what_has_not_been_used_for_longest_goes_and_is_named(
        self, kept: Callable[[str, float, int], Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        kept("new", 2, 4)
        kept("middle", 3, 4)
        with caplog.at_level(logging.INFO):
            assert self.left(tmp_path) == ["middle", "new"] and not caplog.messages
            kept("old", 4, 4)
            kept("oldest", 5, 1)
            assert self.left(tmp_path) == ["middle", "new"]
        (line,) = caplog.messages
        assert line.endswith("removed old, oldest") and str(tmp_path) in line

    def test_what_was_used_within_a_day_stays(self, kept: Callable[[str, float, int], Path], tmp_path: Path) -> None:
        kept("today", 0.1, 20)
        kept("this night", 0.9, 20)
        kept("last week", 7, 1)
        assert self.left(tmp_path) == ["this night", "today"]

    def test_what_another_process_uses_stays(self, kept: Callable[[str, float, int], Path], tmp_path: Path) -> None:
        place = kept("long run", 30, 20)
        program = (
            "import sys\nfrom pathlib import Path\nfrom cocor import compiled_code\n"
            "compiled_code._use(Path(sys.argv[1]))\nprint('used', flush=True)\nsys.stdin.read()"
        )
        user = subprocess.Popen(
            [sys.executable, "-c", program, str(place)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        with user:
            assert user.stdin is not None and user.stdout is not None and user.stdout.readline() == "used\n"
            os.utime(place / "used", (0, 0))
            assert self.left(tmp_path) == ["long run"]
            user.stdin.close()
            assert user.wait(30) == 0
        assert self.left(tmp_path) == []

    def test_files_of_earlier_versions_go_too(self, kept: Callable[[str, float, int], Path], tmp_path: Path) -> None:
        kept("new", 2, 8)
        for name in ("fxgraph", "triton", "ab"):
            (tmp_path / name).mkdir()
            (tmp_path / name / "code").write_bytes(b"x" * 9000)
            os.utime(tmp_path / name, (0, 0))
        assert self.left(tmp_path) == ["new"]

    def test_removing_takes_about_a_second_and_goes_on_the_next_time(
        self, kept: Callable[[str, float, int], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(compiled_code, "_REMOVING", 0.0)
        kept("old", 30, 11)
        for number in range(3):
            kept(f"older {number}", 40, 1)
        compiled_code._use(tmp_path / "now")
        assert self.left(tmp_path) == [".removed", "now"]
        monkeypatch.undo()
        assert self.left(tmp_path) == ["now"]

    def test_a_cache_too_large_to_look_through_is_named(
        self,
        kept: Callable[[str, float, int], Path],
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        monkeypatch.setattr(compiled_code, "_LOOKING", 0.0)
        kept("small", 3, 1)
        assert self.left(tmp_path) == ["small"]
        assert caplog.messages == [
            f"{tmp_path} holds too many files to see how large it is; empty it if space is short"
        ]

    def test_a_run_removes_what_is_old(
        self, kept: Callable[[str, float, int], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        kept("cocor/compiled/old", 30, 20)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        monkeypatch.delenv(compiled_code.VARIABLE, raising=False)
        compiled_code.keep(Config())
        (place,) = (tmp_path / "cocor" / "compiled").iterdir()
        assert os.environ[compiled_code.VARIABLE] == str(place)
