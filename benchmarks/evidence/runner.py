"""Runner of a study: trainings as processes, several at a time, resumed if they were stopped, skipped if done.

Beside the folder of run NAME, ``NAME.txt`` and ``NAME.linear.txt`` hold what is printed, and ``NAME.done.json`` flags,
settings, machine and the probe's images, so that other flags, configurations or defaults are noticed, not mixed in.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from benchmarks.common import describe_machine, write_json
from benchmarks.evidence.studies import Variant
from cocor.config.arguments import flag
from cocor.config.options import Config
from cocor.distributed import signals
from loaders.errors import UserError

_PATIENCE = 120.0  # seconds for a run to write its checkpoint and stop
# Exit codes after a signal: of cocor-train and cocor-eval, and of both before their handlers are in place.
_STOPPED = {signals.STOPPED, signals.INTERRUPTED, 128 + signal.SIGTERM, -signal.SIGTERM, -signal.SIGINT}


@dataclass(frozen=True)
class Training:
    """A run: its folder, its flags except ``output`` and ``resume``, all ``settings`` that affect its steps, and the
    images of its linear probe."""

    method: str
    variant: Variant
    seed: int
    folder: Path
    flags: dict[str, Any]
    settings: dict[str, Any]
    linear: Path | None = None

    def beside(self, ending: str) -> Path:
        return self.folder.with_name(f"{self.folder.name}.{ending}")

    def record(self) -> dict[str, Any]:
        """Read what was recorded after training and evaluation; empty if it is not trained."""
        marker = self.beside("done.json")
        return json.loads(marker.read_text()) if marker.is_file() else {}

    def is_done(self) -> bool:
        """Whether it is trained, and evaluated if asked for. UserError if it was trained with other settings."""
        record, default = self.record(), Config().to_dict()  # the latter of keys that came later
        if not record:
            return False
        changed = [key for key, value in self.settings.items() if record["settings"].get(key, default[key]) != value]
        if changed:
            words = ", ".join(sorted(changed))
            raise UserError(f"{self.folder}: a finished run with other {words}; choose another --output")
        return self.linear is None or record["linear"] == str(self.linear)

    def mark(self) -> None:
        """Record that the run is trained or, if that was recorded before, evaluated."""
        flags = {key: str(value) for key, value in self.flags.items()}
        new = {"flags": flags, "settings": self.settings, "machine": describe_machine(), "linear": None}
        record = self.record()
        write_json(self.beside("done.json"), record | {"linear": str(self.linear)} if record else new)

    def command(self) -> list[str]:
        """Command of the training, or of the evaluation if the run is trained."""
        words, values = ["cocor.train"], self.flags | {"output": self.folder, "resume": "auto"}
        if self.record():  # architecture, stem and image size are stored with the weights
            words, gpu = ["cocor.eval.cli", "linear", str(self.folder)], "yes" if int(self.flags["gpus"]) else "no"
            values = {"data": self.linear, "output": self.folder / "linear", "gpu": gpu}
        return [sys.executable, "-P", "-m", *words, *(f"{flag(key)}={value}" for key, value in values.items())]


class Crew:
    """Pool of ``jobs`` slots spread over ``gpus`` (0: the CPU), which stops at ``deadline`` (``time.monotonic``)."""

    def __init__(self, jobs: int, gpus: int, deadline: float | None, say: Callable[[str], None] = print) -> None:
        self._jobs, self._gpus, self._deadline, self._say = jobs, gpus, deadline, say
        self._running: set[subprocess.Popen[bytes]] = set()
        self._ending, self._lock = False, threading.Lock()
        self.failed: dict[str, str] = {}  # run -> why
        self.stopped: list[str] = []

    def run(self, trainings: Sequence[Training]) -> None:
        """Do all that is not done yet. A signal stops the runs, which can be resumed, and then this process."""
        waiting, slots = [training for training in trainings if not training.is_done()], SimpleQueue[int]()
        self._say(f"{len(trainings)} runs, {len(trainings) - len(waiting)} of them done, {self._jobs} at a time")
        heeded = [number for number in signals.SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]  # not nohup's
        before = {number: signal.signal(number, signal.default_int_handler) for number in heeded}
        left = None if self._deadline is None else max(0.0, self._deadline - time.monotonic())
        self._ending = left == 0
        for slot in range(self._jobs):
            slots.put(slot)
        with ThreadPoolExecutor(self._jobs) as pool:
            futures = [pool.submit(self._complete, training, slots) for training in waiting]
            try:
                wait(futures, left)
            except KeyboardInterrupt:
                self._say(f"stopping {len(self._running)} runs: the same command goes on from there")
                raise
            finally:
                with self._lock:
                    self._ending = True
                for process in list(self._running):
                    process.terminate()
                wait(futures, _PATIENCE)
                for process in list(self._running):
                    process.kill()
                for number, handler in before.items():
                    signal.signal(number, handler)
        for future in futures:
            future.result()  # raises what went wrong here

    def _complete(self, training: Training, slots: "SimpleQueue[int]") -> None:
        """Train and evaluate in a free slot."""
        slot, code, name = slots.get(), 0, training.folder.name
        try:
            while not code and not training.is_done():
                code = self._execute(training, slot, name)
                if not code:
                    training.mark()
        finally:
            slots.put(slot)
        if code in _STOPPED:
            self.stopped.append(name)
        else:
            self._say(f"failed {name}: {self.failed[name]}" if code else f"finished {name}")

    def _execute(self, training: Training, slot: int, name: str) -> int:
        """Run the next command of ``training``; the exit code."""
        environment = os.environ | {"PYTHONUNBUFFERED": "1"}  # else the reason of a failure may not be the last line
        if self._gpus:
            visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(self._gpus)))).split(",")
            environment["CUDA_VISIBLE_DEVICES"] = visible[slot % self._gpus]
        elif self._jobs > 1:
            environment.setdefault("OMP_NUM_THREADS", "1")
        probe = ": linear probe" if training.record() else ""
        output = training.beside("linear.txt" if probe else "txt")
        output.parent.mkdir(parents=True, exist_ok=True)
        streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stderr": subprocess.STDOUT, "start_new_session": True}
        with self._lock, output.open("wb") as file:
            if self._ending:
                return signals.STOPPED
            process = subprocess.Popen(training.command(), env=environment, stdout=file, **streams)
            self._running.add(process)
        self._say(f"started {name}{probe}")
        code = process.wait()
        self._running.remove(process)
        if code and code not in _STOPPED:
            self.failed[name] = output.read_text(errors="replace").strip().rpartition("\n")[2] or f"exit code {code}"
        return code
