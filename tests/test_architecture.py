"""Imports follow the arrows of the README's map: no circles between folders, leaves stay leaves."""

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = sorted(path.relative_to(ROOT) for package in ("cocor", "loaders") for path in (ROOT / package).rglob("*.py"))
MODULES = {".".join(path.with_suffix("").parts): path for path in FILES if path.name != "__init__.py"}
PACKAGES = {".".join(path.parent.parts) for path in FILES if path.name == "__init__.py"}
MOST_FILES = 14  # of a folder; these two hold one file a kernel and one a source format
LARGE = {"loaders.kernels", "loaders.prep"}


def imports(path: Path) -> Iterator[str]:
    """The modules of this project that ``path`` imports when it runs, late imports included."""
    tree = ast.parse((ROOT / path).read_text())
    for_types = [node for node in tree.body if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)]
    skipped = {id(inner) for node in for_types for inner in ast.walk(node)}
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names] + [node.module]
        else:
            continue
        yield from (name for name in names if name in MODULES)


def folder(module: str) -> str:
    """The folder of a module; a file at the root of a package is a folder of its own, and eval is one with its own."""
    package = module.rpartition(".")[0]
    if package.startswith("cocor.eval"):
        return "cocor.eval"
    return module if package in {"cocor", "loaders"} else package


GRAPH = {module: set(imports(path)) - {module} for module, path in MODULES.items()}


def test_no_import_circles_between_files() -> None:
    list(TopologicalSorter(GRAPH).static_order())


def test_no_import_circles_between_folders() -> None:
    arrows: dict[str, set[str]] = {}
    for module, found in GRAPH.items():
        arrows.setdefault(folder(module), set()).update(map(folder, found))
    list(TopologicalSorter({source: targets - {source} for source, targets in arrows.items()}).static_order())


@pytest.mark.parametrize(
    ("source", "allowed"),
    [
        ("loaders", ("loaders",)),
        ("cocor.objective", ("cocor.objective", "cocor.methods.base", "loaders.views.ops", "loaders.errors")),
        ("cocor.config", ("cocor.config", "cocor.methods", "cocor.auxiliary", "loaders")),
        ("cocor.auxiliary", ("cocor.auxiliary", "cocor.methods", "cocor.objective", "loaders")),
        ("cocor.weights", ("cocor.weights", "cocor.backbone", "cocor.run_dir", "loaders")),
        ("cocor.distributed", ("cocor.distributed", "cocor.config", "loaders")),
        ("cocor.step",
         ("cocor.step", "cocor.auxiliary", "cocor.objective", "cocor.methods", "cocor.distributed", "cocor.config",
          "loaders")),
    ],
)  # fmt: skip
def test_imports_of_a_folder_are_limited(source: str, allowed: tuple[str, ...]) -> None:
    for module, found in GRAPH.items():
        if within(module, source):
            assert not {name for name in found if not any(within(name, place) for place in allowed)}, module


@pytest.mark.parametrize(
    ("leaf", "users"),
    [
        ("cocor.monitor", {"cocor.train", "cocor.run", "cocor.resume", "cocor.cli"}),
        ("cocor.eval", {"cocor.train", "cocor.run", "cocor.cli", "cocor.monitor.plot"}),
        ("loaders.prep", {"cocor.data", "cocor.run_dir", "cocor.cli", "cocor.eval.commands",
                          "cocor.eval.datasets.archives", "cocor.eval.datasets.splits"}),
    ],
)  # fmt: skip
def test_leaves_are_imported_by_few(leaf: str, users: set[str]) -> None:
    found = {module for module, names in GRAPH.items() if any(within(name, leaf) for name in names)}
    assert {module for module in found if not within(module, leaf)} <= users


def test_objective_does_no_io() -> None:
    for module in MODULES:
        if within(module, "cocor.objective"):
            names = {
                node.id
                for node in ast.walk(ast.parse((ROOT / MODULES[module]).read_text()))
                if isinstance(node, ast.Name)
            }
            assert not names & {"open", "Path", "print", "os", "logging"}, module


@pytest.mark.parametrize("package", sorted(PACKAGES - LARGE))
def test_a_folder_fits_on_a_screen(package: str) -> None:
    assert len([module for module in MODULES if module.rpartition(".")[0] == package]) <= MOST_FILES


def test_every_folder_is_a_package() -> None:
    assert {".".join(path.parent.parts) for path in FILES} == PACKAGES


def within(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")
