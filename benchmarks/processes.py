"""Isolated processes: functions run in children of a fork server.

It has imported the heavy modules and nothing else: no CUDA, no threads. A process that raises, crashes or hangs
yields a text in place of a result, and none outlives the caller, as it would disturb what is measured next.
"""

import multiprocessing
import os
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

from loaders.errors import UserError

_PRELOADED = ["torch", "torchvision.transforms.v2", "loaders.open", "loaders.kernels.cpu", "cocor.step.step",
              "cocor.models"]  # fmt: skip
_GRACE = 10.0  # seconds to end after an answer, or after another process has failed

Job = tuple[Callable[..., Any], tuple[Any, ...]]


def alone(function: Callable[..., Any], *arguments: Any) -> Any:
    """Run one function in a process of its own. UserError with what went wrong."""
    (answer,) = in_processes([(function, arguments)], seconds=600.0)
    if isinstance(answer, str):
        raise UserError(answer)
    return answer


def in_processes(jobs: list[Job], seconds: float) -> list[Any]:
    """Run all jobs at once, each in a process: results, or texts that say why not."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    running: list[tuple[Any, Any]] = []
    answers: list[Any] = []
    try:
        for job in jobs:
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=_run, args=(sender, *job))
            process.start()
            sender.close()
            running.append((process, receiver))
        deadline = time.monotonic() + seconds
        for process, receiver in running:
            try:
                ready = receiver.poll(max(0.0, deadline - time.monotonic()))
                answers.append(receiver.recv() if ready else f"no result within {seconds:.0f} s")
            except EOFError:
                process.join()
                code = process.exitcode
                answers.append(f"ended by signal {-code}" if code < 0 else f"exit code {code}")
            if isinstance(answers[-1], str):  # the others may wait for it
                deadline = min(deadline, time.monotonic() + _GRACE)
            else:
                process.join(_GRACE)
    finally:
        for process, receiver in running:
            process.kill()
            process.join()
            receiver.close()
    return answers


def _run(sender: Any, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        answer = function(*arguments)
    except UserError as error:
        answer = str(error)
    except Exception as error:
        traceback.print_exc()
        answer = f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}"
    sender.send(answer)
    sender.close()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
