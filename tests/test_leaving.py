"""Ranks that end together; what happens between real ranks is in test_nodes.py."""

import os
import socket
import subprocess
import sys

import pytest

_LISTENING = """
import sys
from torch.distributed import TCPStore
from cocor import leaving

leaving._LOOK_SECONDS = 0.0  # the thread that looks is nearly always within the store
inside = leaving.heard(TCPStore("127.0.0.1", 0, is_master=True), 2, True)
inside.__enter__()
sys.exit(2)
"""

_RANK = """
import atexit, sys, threading
from torch.distributed import TCPStore
from cocor import distributed, leaving, launch
from loaders.errors import UserError

def body():
    distributed.init(use_gpu=False)
    own = TCPStore("127.0.0.1", 0, is_master=True)
    threading.Thread(target=lambda: [own.check(["nothing"]) for _ in iter(int, 1)], daemon=True).start()
    atexit.register(print, "cleared up")
    with distributed.company():
        ENDING

sys.exit(launch.command("cocor-eval", body))
"""
ENDINGS = {
    "raise UserError('no')": 2,
    "raise KeyError('a bug')": 1,
    "sys.exit(143)": 143,
    "raise KeyboardInterrupt": 130,
}


def test_the_thread_that_listens_does_not_abort_a_process_that_ends() -> None:
    ends = [subprocess.Popen([sys.executable, "-c", _LISTENING], stderr=subprocess.PIPE, text=True) for _ in range(2)]
    said = [process.communicate(timeout=60)[1] for process in ends]
    assert [process.returncode for process in ends] == [2, 2], said


@pytest.mark.parametrize("ending", ENDINGS)
def test_no_thread_within_a_library_aborts_a_rank_that_ends(ending: str) -> None:
    """Python's own way ends such a rank by SIGABRT, nearly always."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        here = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "OMP_NUM_THREADS": "1"}
    code = [sys.executable, "-c", _RANK.replace("ENDING", ending)]
    ends = [
        subprocess.Popen(
            code,
            env=os.environ | here | {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in "01"
    ]
    said = [process.communicate(timeout=60) for process in ends]
    assert [process.returncode for process in ends] == [ENDINGS[ending]] * 2, said
    assert [output for output, _ in said] == ["cleared up\n"] * 2
