"""Pairs of ranks that end in many ways: ``python -m forked_ranks CASES FOLDER``.

A case is a name and the code of each rank, the body of a command once, or before, the ranks have met. Prints a line of
JSON for each: exit codes, seconds until each had ended, and what they printed. Forked, since importing takes longer.
"""

import json
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

from cocor.distributed import collectives, launch, signals

AT_ONCE = 3  # pairs
BEFORE = "# before\n"  # begins code that runs before the ranks have met
JOINING = """# before
import os, time
import torch.distributed as dist
dist.init_process_group = lambda *_, **__: (%s, time.sleep(60))
"""  # what a rank does that knows that all are there, while the others join each other already
ANSWERED = """# before
import os, time
import torch.distributed as dist
add = dist.TCPStore.add
dist.TCPStore.add = lambda store, key, amount: (add(store, key, amount), %s, time.sleep(60))[0]
"""  # what one does that has said that it is there, and does not know yet that the others go on


def rank(number: int, port: int, code: str, folder: Path) -> int:
    """Start one in the background; its process number."""
    process = os.fork()
    if process:
        return process
    for stream, name in ((1, "out"), (2, "err")):
        file = os.open(folder / f"{name}{number}", os.O_WRONLY | os.O_CREAT)
        os.dup2(file, stream)
    sys.stdout = os.fdopen(1, "w", closefd=False)  # which is not a terminal: kept until the end
    place = {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": port}
    os.environ |= {"MASTER_ADDR": "127.0.0.1"} | {key: str(value) for key, value in place.items()}

    def body() -> None:
        if code.startswith(BEFORE):
            exec(code, globals())
        collectives.init(use_gpu=False)
        with collectives.company():
            print("met")
            exec(code, globals())
        collectives.shutdown()

    with signals.at_once(launch.leave_at_once):
        ended = launch.command("cocor-eval", body, ranks=True)
    sys.exit(ended)


def both(name: str, codes: list[str], folder: Path) -> dict[str, Any]:
    """Start two and wait for them; one that has stopped is killed once the other has ended."""
    folder.mkdir()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    begin, stopped, ends = time.monotonic(), set(), dict[int, tuple[int, float]]()
    ranks = [rank(number, port, code, folder) for number, code in enumerate(codes)]
    while len(ends) < 2:
        for process in {*ranks} - {*ends}:
            found, status = os.waitpid(process, os.WNOHANG | os.WUNTRACED)
            if found and os.WIFSTOPPED(status):
                stopped.add(process)
            elif found:
                ends[process] = os.waitstatus_to_exitcode(status), time.monotonic() - begin
        if time.monotonic() - begin > 50 or (ends and stopped - {*ends}):
            for process in {*ranks} - {*ends}:
                os.kill(process, signal.SIGKILL)
        time.sleep(0.01)
    return {
        "name": name,
        "codes": [ends[process][0] for process in ranks],
        "seconds": [ends[process][1] for process in ranks],
        "out": [(folder / f"out{number}").read_text() for number in range(2)],
        "err": [(folder / f"err{number}").read_text() for number in range(2)],
    }


def all_cases(cases: dict[str, list[str]], folder: Path) -> None:
    """Some at a time, since they mostly wait; a line each on stdout."""
    running = 0
    for name, codes in cases.items():
        if running == AT_ONCE:
            os.wait()
            running -= 1
        if not os.fork():
            found = both(name, codes, folder / name)  # out of which its ranks leave by SystemExit, as programs do
            (folder / f"{name}.json").write_text(json.dumps(found))
            os._exit(0)
        running += 1
    for _ in range(running):
        os.wait()
    for name in cases:
        print((folder / f"{name}.json").read_text())


if __name__ == "__main__":
    all_cases(json.loads(sys.argv[1]), Path(sys.argv[2]))
