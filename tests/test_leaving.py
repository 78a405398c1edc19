"""Ranks that end together; what happens between real ranks is in test_nodes.py."""

import subprocess
import sys

_ENDS = """
import sys
from torch.distributed import TCPStore
from cocor import leaving

leaving._LOOK_SECONDS = 0.0  # the thread that looks is nearly always within the store
inside = leaving.heard(TCPStore("127.0.0.1", 0, is_master=True), 2)
inside.__enter__()
sys.exit(2)
"""


def test_the_thread_that_listens_does_not_abort_a_process_that_ends() -> None:
    ends = [subprocess.Popen([sys.executable, "-c", _ENDS], stderr=subprocess.PIPE, text=True) for _ in range(2)]
    said = [process.communicate(timeout=60)[1] for process in ends]
    assert [process.returncode for process in ends] == [2, 2], said
