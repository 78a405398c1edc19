"""The short form of benchmarks/faults.py: runs that are broken at random moments end as if nothing had happened."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_broken_runs_lose_and_repeat_nothing() -> None:
    call = [sys.executable, str(ROOT / "benchmarks" / "faults.py"), "--rounds", "3", "--lanes", "torch"]
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        call, capture_output=True, text=True, timeout=400, env=os.environ | {"PYTHONPATH": paths}, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "3 rounds" in done.stdout and "1 whole runs compared" in done.stdout
    assert "samples lost: 0, repeated: 0; weights that differ: 0" in done.stdout
