"""What the READMEs point at exists."""

import re
from pathlib import Path

import pytest
from helpers.runs import READMES

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("name", READMES)
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


def test_every_result_is_shown() -> None:
    """Numbers and pictures of which no page speaks are of no use to anybody."""
    text = "".join((ROOT / name).read_text() for name in READMES)
    unnamed = [file.name for file in (ROOT / "benchmarks/results").iterdir() if file.name not in text]
    assert not unnamed
