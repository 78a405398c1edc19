"""Functions run in processes of their own, forked from a server that has the heavy modules and nothing else.

The server has imported torch and its like, but touched neither GPU nor threads, so a process starts in milliseconds and
inherits no state. A process that raises, crashes or hangs gives a text that says so in place of a result.
"""

import multiprocessing
import time
import traceback
from collections.abc import Callable
from typing import Any

from loaders.errors import UserError

_PRELOADED = ["torch", "torchvision.transforms.v2", "loaders.open", "loaders.kernels.cpu", "cocor.step", "cocor.build"]

_PARTING = 10.0  # seconds in which a process ends once it has answered

Job = tuple[Callable[..., Any], tuple[Any, ...]]


def alone(function: Callable[..., Any], *arguments: Any) -> Any:
    """The result of one function. UserError with what went wrong."""
    (answer,) = in_processes([(function, arguments)], seconds=600.0)
    if isinstance(answer, str):
        raise UserError(answer)
    return answer


def in_processes(jobs: list[Job], seconds: float) -> list[Any]:
    """Run every job in a process of its own, all at once; their results, or for a failed one a text that says why."""
    default = multiprocessing.get_start_method()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    running = []
    for job in jobs:
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_run, args=(sender, default, *job))
        process.start()
        sender.close()
        running.append((process, receiver))
    deadline = time.monotonic() + seconds
    answers = []
    for process, receiver in running:
        answers.append(_answer(process, receiver, deadline) or f"no result within {seconds:.0f} s")
        if isinstance(answers[-1], str):  # the others may wait for it
            deadline = min(deadline, time.monotonic() + _PARTING)
    return answers


def _answer(process: Any, receiver: Any, deadline: float) -> Any:
    """What the process sends, or how it ended; None if it does neither in time. It has ended afterwards."""
    answer: Any = None
    try:
        if receiver.poll(max(0.0, deadline - time.monotonic())):
            answer = receiver.recv()
    except EOFError:
        process.join()
        code = process.exitcode
        answer = f"ended by signal {-code}" if code < 0 else f"exit code {code}"
    process.join(0 if answer is None else _PARTING)
    if process.is_alive():
        process.kill()
        process.join()
    return answer


def _run(sender: Any, start_method: str, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    multiprocessing.set_start_method(start_method, force=True)  # of worker processes: as in anybody's program
    try:
        answer = function(*arguments)
    except UserError as error:
        answer = str(error)
    except Exception as error:
        traceback.print_exc()
        answer = f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}"
    sender.send(answer)
    sender.close()
