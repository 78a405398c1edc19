"""The page on the Python API: its examples run, and its table is that of the docstrings."""

import inspect
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from helpers.runs import ROOT, environment

import cocor
import loaders

PAGE = (ROOT / "cocor/API.md").read_text()
CONSTANTS = {"METHODS": "Choices of `method`: a class each.", "POOLS": "Choices of `pool`: a tuple of `Op` each."}
PUBLIC = [(package, name) for package in (cocor, loaders) for name in package.__all__]


def row(package: ModuleType, name: str) -> str:
    """The row of the table that describes a name, by the first line of its docstring."""
    about = CONSTANTS.get(name) or str(inspect.getdoc(getattr(package, name))).splitlines()[0]
    return f"| `{package.__name__}.{name}` | {about.replace('``', '`')} |"


@pytest.mark.parametrize(("package", "name"), PUBLIC, ids=lambda value: getattr(value, "__name__", value))
def test_the_table_has_every_name(package: ModuleType, name: str) -> None:
    assert row(package, name) in PAGE.splitlines()


def test_the_examples_run(photo_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a reader would run them, one after the other."""
    (tmp_path / "photos").symlink_to(photo_folder)
    blocks = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    assert len(blocks) == 5
    place = environment() | {"PYTHONPATH": str(ROOT)}
    call = [sys.executable, "-c", "\n".join(blocks).replace("resnet18", "test_resnet")]  # for speed
    done = subprocess.run(call, cwd=tmp_path, env=place, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"^contrastive -?[0-9.]+, consistency [0-9.]+, CE [0-9.]+$", done.stdout, re.MULTILINE)) == 3
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {"api", "align", "turns"}


def test_import_is_quick() -> None:
    found = "import sys, cocor, loaders; print('torch' in sys.modules, 'numpy' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", found], env=environment(), text=True) == "False False\n"


def test_unknown_names_are_no_attributes() -> None:
    assert not hasattr(cocor, "nonsense") and not hasattr(loaders, "nonsense")
