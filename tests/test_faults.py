"""The short form of benchmarks/faults.py: runs that are broken at random moments end as if nothing had happened."""

import os
import random
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

import fault_acts  # noqa: E402
import resume_noise  # noqa: E402
from fault_acts import Fault  # noqa: E402
from fault_runs import Broken, Lane, Process, Start  # noqa: E402


def benchmark(place: Path, name: str, *arguments: str) -> str:
    """What it prints; it leaves nothing of its own in ``place``, its folder for temporary files."""
    call = [sys.executable, str(ROOT / "benchmarks" / name), *arguments]
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": paths, "TMPDIR": str(place)}
    done = subprocess.run(call, capture_output=True, text=True, timeout=400, env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not list(place.glob("cocor*"))
    return done.stdout


def test_broken_runs_lose_and_repeat_nothing(tmp_path: Path) -> None:
    printed = benchmark(tmp_path, "faults.py", "--rounds", "3", "--lanes", "torch")
    assert "3 rounds" in printed and "1 whole runs compared" in printed
    assert "samples lost: 0, repeated: 0; weights that differ: 0" in printed


def test_resume_noise_is_zero_on_the_cpu(tmp_path: Path) -> None:
    printed = benchmark(tmp_path, "resume_noise.py", "--device", "cpu", "--loaders", "synthetic")
    assert "same samples, 0 lost, 0 repeated; two runs 0.0e+00 apart, the resumed one 0.0e+00" in printed


@pytest.mark.parametrize(
    "words", [("faults.py", "--lanes", "torch"), ("resume_noise.py", "--device", "cpu", "--loaders", "synthetic")]
)
def test_a_stopped_benchmark_cleans_up(words: tuple[str, ...], tmp_path: Path) -> None:
    call = [sys.executable, str(ROOT / "benchmarks" / words[0]), *words[1:]]
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": paths, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(call, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment) as process:
        while not list(tmp_path.glob("cocor*/**/metrics.jsonl")):  # a run is under way
            assert process.poll() is None
            time.sleep(0.05)
        process.terminate()
        assert process.wait(120) == 130
    assert not list(tmp_path.glob("cocor*"))
    needle, end = f"TMPDIR={tmp_path}\0".encode(), time.monotonic() + 60
    while any(needle in environment_of(entry) for entry in Path("/proc").glob("[0-9]*/environ")):
        assert time.monotonic() < end
        time.sleep(0.1)


def environment_of(entry: Path) -> bytes:
    try:
        return entry.read_bytes()
    except OSError:  # gone, or of another user
        return b""


def started(folder: Path, *command: str) -> Start:
    """A process that stands for a run."""
    (folder / "printed.txt").touch()
    pid = os.posix_spawnp(command[0], command, os.environ, setsid=True)
    return Start(pid, time.time(), folder / "printed.txt")


@pytest.mark.parametrize("fault", [fault_acts.kill_everything, fault_acts.kill_rank, fault_acts.ask_to_stop])
@pytest.mark.parametrize("found", [True, False])
def test_a_run_may_end_before_its_fault(
    fault: Fault, found: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, rank = (started(tmp_path, "true") for _ in range(2))
    assert rank.wait() == 0
    seen = [Process(rank.pid, rank=True, worker=False)] if found else []
    monkeypatch.setattr(fault_acts.runs, "processes_of", lambda *_: seen)
    fault(run, Lane("2 ranks", {}, tmp_path), random.Random(0))
    assert run.code == 0


def test_no_run_outlives_a_comparison_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[Start] = []

    def start(lane: Lane, *more: str) -> Start:
        runs.append(started(tmp_path, "sleep", "600"))
        return runs[-1]

    def never(*_: object) -> None:
        raise Broken("no step is made")

    monkeypatch.setattr(resume_noise.runs, "start", start)
    monkeypatch.setattr(resume_noise, "wait_until", never)
    with pytest.raises(Broken, match="no step is made"):
        resume_noise._compare(Lane("torch", {}, tmp_path))
    assert [run.wait() for run in runs] == [-9, -9, -9]


@pytest.mark.parametrize(
    ("page", "title"), [("README.md", "What happens when something fails"), ("cocor/README.md", "Rarer failures")]
)
def test_every_failure_row_names_its_test(page: str, title: str) -> None:
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
