"""What the READMEs say is there is there."""

import ast
import re
from pathlib import Path

import pytest
from helpers.runs import PAGES

ROOT = Path(__file__).parents[1]
MAIN = (ROOT / "README.md").read_text()


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_somewhere(name: str) -> None:
    file = ROOT / name
    links = re.findall(r"\]\(([^)\s]+)\)", re.sub(r"```.*?```", "", file.read_text(), flags=re.DOTALL))
    local = [link for link in links if "://" not in link]
    assert local
    for link in local:
        path, _, heading = link.partition("#")
        target = (file.parent / path).resolve() if path else file
        assert target.is_file() and ROOT in target.parents, f"{name}: {link}"
        if heading:
            titles = re.findall(r"^#+ (.*)$", target.read_text(), flags=re.MULTILINE)
            assert heading in {re.sub(r"[^\w\- ]", "", title).strip().lower().replace(" ", "-") for title in titles}, (
                link
            )


@pytest.mark.parametrize("name", PAGES)
def test_named_files_exist(name: str) -> None:
    """Wherever a page names one by its path; NAME stands for any name."""
    text = (ROOT / name).read_text()
    named = re.findall(r"(?<![\w./~-])(?:cocor|loaders|benchmarks|configs|tests)/[\w./-]*[\w/]", text)
    for path in named:
        assert any(ROOT.glob(path.rstrip("/").replace("NAME", "*"))), path


@pytest.mark.parametrize("name", PAGES)
def test_named_tests_exist(name: str) -> None:
    for path, inside in re.findall(r"`([\w/]*test_\w+\.py)((?:::\w+)*)`", (ROOT / name).read_text()):
        nodes: list[ast.stmt] = ast.parse((ROOT / path).read_text()).body
        for part in inside.split("::")[1:]:
            found = [node for node in nodes if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name == part]
            assert found, path + inside
            nodes = found[0].body


def test_every_failure_row_names_a_test() -> None:
    text = (ROOT / "cocor/README.md").read_text()
    section = text.split("## What happens when something fails\n")[1].split("\n## ")[0]
    rows = [row for row in section.splitlines() if row.startswith("| ")][1:]
    assert len(rows) > 20
    for row in rows:
        assert re.search(r"test_\w+\.py", row.split("|")[3]), row


def test_every_result_is_shown() -> None:
    """Numbers and pictures of which no page speaks are of no use to anybody."""
    text = "".join((ROOT / name).read_text() for name in PAGES)
    unnamed = [file.name for file in (ROOT / "benchmarks/results").iterdir() if file.name not in text]
    assert not unnamed


def test_the_map_is_true_and_whole() -> None:
    block = MAIN.split("## Map of the code\n")[1].split("```")[1]
    paths, package = set(), ""
    for line in filter(None, block.splitlines()):
        names = re.match(r"(?: ? ?\S+(?:/|\.py))+(?= )", line)
        assert names, line
        for name in names[0].split():
            paths.add(package + name if line.startswith(" ") else name)
        if not line.startswith(" "):
            package = names[0].split()[0]
    assert not [path for path in paths if not (ROOT / path).exists()]
    for folder in ("cocor", "loaders"):
        there = {f"{folder}/{file.name}" for file in (ROOT / folder).glob("*.py")}
        there |= {f"{folder}/{file.parent.name}/" for file in (ROOT / folder).glob("*/__init__.py")}
        assert there - paths == {f"{folder}/__init__.py"}


def test_the_main_page_is_short() -> None:
    assert len(MAIN.splitlines()) <= 150
    assert "test_" not in MAIN
