"""The short form of benchmarks/faults.py: runs that are broken at random moments end as if nothing had happened."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def benchmark(name: str, *arguments: str) -> str:
    """What it prints."""
    call = [sys.executable, str(ROOT / "benchmarks" / name), *arguments]
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        call, capture_output=True, text=True, timeout=400, env=os.environ | {"PYTHONPATH": paths}, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_broken_runs_lose_and_repeat_nothing() -> None:
    printed = benchmark("faults.py", "--rounds", "3", "--lanes", "torch")
    assert "3 rounds" in printed and "1 whole runs compared" in printed
    assert "samples lost: 0, repeated: 0; weights that differ: 0" in printed


def test_on_the_cpu_a_resumed_run_is_no_further_from_an_unbroken_one_than_another() -> None:
    printed = benchmark("resume_noise.py", "--device", "cpu", "--loaders", "synthetic")
    assert "same samples, 0 lost, 0 repeated; two runs 0.0e+00 apart, the resumed one 0.0e+00" in printed


@pytest.mark.parametrize(
    ("page", "title"), [("README.md", "What happens when something fails"), ("cocor/README.md", "Rarer failures")]
)
def test_every_row_of_what_happens_when_names_its_test(page: str, title: str) -> None:
    section = (ROOT / page).read_text().split(f"# {title}\n")[1].split("\n#")[0]
    rows = [row.split("|")[1:4] for row in section.splitlines() if row.startswith("| ")][1:]
    assert len(rows) > 10
    file = ""
    for when, _, tests in rows:
        names = re.findall(r"`(?:(test_\w+\.py)(?:::)?)?([\w:]*)`", tests)
        assert names or tests.strip() == "the same", when
        for module, place in names:
            file = module or file
            source = (ROOT / "tests" / file).read_text()
            assert all(re.search(rf"(def|class) {name}\b", source) for name in place.split("::") if name), (when, place)
