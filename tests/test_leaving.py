"""Ranks that end together: pairs of real ones over gloo; whole runs are in test_nodes.py."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from forked_ranks import ANSWERED, BEFORE, JOINING
from test_train import environment

_LISTENING = """
import sys
from torch.distributed import TCPStore
from cocor import leaving

leaving._LOOK_SECONDS = 0.0  # the thread that looks is nearly always within the store
leaving.meet(TCPStore("127.0.0.1", 0, is_master=True), 2, True)
leaving.listen()
sys.exit(2)
"""

_BUSY = """
import atexit, threading
from torch.distributed import TCPStore
from cocor import leaving
from loaders.errors import UserError
own = TCPStore("127.0.0.1", 0, is_master=True)
threading.Thread(target=lambda: [own.check(["nothing"]) for _ in iter(int, 1)], daemon=True).start()
atexit.register(print, "cleared up")
leaving.alone()  # each ends by itself, however long the other takes to
distributed.barrier()
"""
_WAIT = "distributed.barrier()"  # for the other
_ENDED, _KILLED, _STANDS = (f"os.kill(os.getpid(), {number})" for number in (15, 9, 19))
_IMPATIENT = f"{BEFORE}from cocor import meeting; meeting._JOINING = 2.0"
_FAIL = "from loaders.errors import UserError; raise UserError('no')"
_STOPPED = "stopped by SIGTERM before a step was made; the same command with --resume goes on from there"
ENDINGS = {
    "mistake": ("raise UserError('no')", 2),
    "bug": ("raise KeyError('a bug')", 1),
    "asked": ("import sys; sys.exit(143)", 143),
    "Ctrl-C": ("raise KeyboardInterrupt", 130),
}
SIGNALS = {
    "SIGTERM": ("import os, time; os.kill(os.getpid(), 15); time.sleep(60)", 75, f"{_STOPPED}\n"),
    "before a step": ("raise stop.Stopped(15)", 75, f"cocor-eval: {_STOPPED}\n"),
    "asked": ("import sys; sys.exit(143)", 143, ""),
    "Ctrl-C": ("raise KeyboardInterrupt", 130, ""),
}
CASES = {  # where one ends alone both have met by then: "before" is for what comes earlier
    **{f"both: {name}": [_BUSY + code] * 2 for name, (code, _) in ENDINGS.items()},
    **{f"main: {name}": [f"{_WAIT}\n{code}", f"{_WAIT}\n{_WAIT}"] for name, (code, _, _) in SIGNALS.items()},
    **{f"other: {name}": [f"{_WAIT}\n{_WAIT}", f"{_WAIT}\n{code}"] for name, (code, _, _) in SIGNALS.items()},
    "the host stops": [
        f"import os, time; {_WAIT}; time.sleep(0.5); os.kill(os.getpid(), 19)",
        f"import time; {_WAIT}; time.sleep(1.5); {_FAIL}",
    ],
    "the other is done": [f"import time; {_WAIT}; time.sleep(1); {_FAIL}", _WAIT],
    "main before": [BEFORE + _FAIL, _WAIT],
    "other before": [_WAIT, BEFORE + _FAIL],
    "both before": [BEFORE + _FAIL] * 2,
    "main joining": [JOINING % _ENDED, _WAIT],
    "other joining": [_WAIT, JOINING % _ENDED],
    "other answered": [_WAIT, ANSWERED % _ENDED],
    "other vanishes": [_IMPATIENT, JOINING % _KILLED],
    "main stands still": [JOINING % f"time.sleep(0.5), {_STANDS}", _IMPATIENT],
    "late before": [BEFORE + "import time; time.sleep(1)", BEFORE + _FAIL],
}


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What came of all ``CASES``."""
    program = [sys.executable, "-m", "forked_ranks", json.dumps(CASES), str(tmp_path_factory.mktemp("ranks"))]
    place = environment()
    place["PYTHONPATH"] += f":{Path(__file__).parent}"
    done = subprocess.run(program, env=place, capture_output=True, text=True, check=True, timeout=300)
    return {case["name"]: case for case in map(json.loads, done.stdout.splitlines())}


def test_the_thread_that_listens_does_not_abort_a_process_that_ends() -> None:
    ends = [subprocess.Popen([sys.executable, "-c", _LISTENING], stderr=subprocess.PIPE, text=True) for _ in range(2)]
    said = [process.communicate(timeout=300)[1] for process in ends]
    assert [process.returncode for process in ends] == [2, 2], said


@pytest.mark.parametrize("ending", ENDINGS)
def test_no_thread_within_a_library_aborts_a_rank_that_ends(ended: dict[str, dict[str, Any]], ending: str) -> None:
    """Python's own way ends such a rank by SIGABRT, nearly always."""
    found = ended[f"both: {ending}"]
    assert found["codes"] == [ENDINGS[ending][1]] * 2, found
    assert found["out"] == ["met\ncleared up\n"] * 2


@pytest.mark.parametrize("ending", SIGNALS)
@pytest.mark.parametrize("which", ["main", "other"])
def test_a_rank_that_alone_is_asked_to_end_takes_the_others_along(
    ended: dict[str, dict[str, Any]], which: str, ending: str
) -> None:
    found, (_, code, said) = ended[f"{which}: {ending}"], SIGNALS[ending]
    assert found["codes"] == [code] * 2 and "".join(found["err"]) == said, found
    assert found["out"] == ["met\n"] * 2  # what has been printed is not lost
    assert max(found["seconds"]) < 15


def test_a_rank_that_fails_does_not_wait_for_a_store_that_does_not_answer(ended: dict[str, dict[str, Any]]) -> None:
    found = ended["the host stops"]
    assert found["codes"][1] == 2 and found["err"][1] == "cocor-eval: error: no\n", found


def test_a_rank_that_fails_does_not_wait_for_one_that_is_done(ended: dict[str, dict[str, Any]]) -> None:
    found = ended["the other is done"]
    assert found["codes"] == [2, 0] and found["err"] == ["cocor-eval: error: no\n", ""], found
    assert found["seconds"][0] - found["seconds"][1] < 4


@pytest.mark.parametrize("which", ["main joining", "other joining", "other answered"])
def test_a_rank_that_ends_while_the_others_join_it_takes_them_along(
    ended: dict[str, dict[str, Any]], which: str
) -> None:
    found = ended[which]
    assert found["codes"] == [75, 75] and "".join(found["err"]) == f"{_STOPPED}\n", found
    assert max(found["seconds"]) < 15


@pytest.mark.parametrize(("which", "left"), [("other vanishes", 0), ("main stands still", 1)])
def test_a_rank_that_vanishes_while_the_others_join_it_is_not_waited_for_for_long(
    ended: dict[str, dict[str, Any]], which: str, left: int
) -> None:
    found = ended[which]
    assert found["codes"][left] == 1 and found["err"][left].count("\n") == 1, found
    assert "a rank has ended, or stands still" in found["err"][left]
    assert found["seconds"][left] < 15


@pytest.mark.parametrize("which", ["main", "other", "both", "late"])
def test_a_mistake_before_the_ranks_have_met_is_said_once_and_ends_all(
    ended: dict[str, dict[str, Any]], which: str
) -> None:
    found = ended[f"{which} before"]
    assert found["codes"] == [2, 2] and "".join(found["err"]) == "cocor-eval: error: no\n", found
    assert max(found["seconds"]) < 15
