"""Runner of a study: trainings as processes, several at a time.

Beside the folder of run NAME, ``NAME.txt`` and ``NAME.PROBE.txt`` hold what is printed, and ``NAME.done.json`` flags,
settings, machine and the probes' images, so that other flags, configurations or defaults are noticed, not mixed in.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from benchmarks.common import describe_machine, write_json
from benchmarks.evidence.studies import Variant
from cocor.config.options import Config
from cocor.config.parse import flag
from cocor.distributed import signals
from loaders.errors import UserError

STOPPED = "stopped"
_PATIENCE = 120.0  # seconds for a run to write its checkpoint and stop
# Exit codes after a signal: of cocor-train and cocor-eval, and of both before their handlers are in place.
_STOPPED = {signals.STOPPED, signals.INTERRUPTED, 128 + signal.SIGTERM, -signal.SIGTERM, -signal.SIGINT}


@dataclass(frozen=True)
class Training:
    """Run of a study; ``settings`` affect its steps, ``probes`` name the data of each."""

    method: str
    variant: Variant
    seed: int
    folder: Path
    flags: dict[str, Any]
    settings: dict[str, Any]
    probes: Mapping[str, Path] = field(default_factory=dict)  # by command of cocor-eval

    def beside(self, ending: str) -> Path:
        return self.folder.with_name(f"{self.folder.name}.{ending}")

    def record(self) -> dict[str, Any]:
        """Read the record of training and evaluation; empty if it is not trained."""
        marker = self.beside("done.json")
        return json.loads(marker.read_text()) if marker.is_file() else {}

    def is_done(self) -> bool:
        """Tell whether all is done. UserError if it was trained with other settings."""
        record, default = self.record(), Config().to_dict()  # the latter of keys that came later
        if not record:
            return False
        changed = [key for key, value in self.settings.items() if record["settings"].get(key, default[key]) != value]
        if changed:
            words = ", ".join(sorted(changed))
            raise UserError(f"{self.folder}: a finished run with other {words}; choose another --output")
        return self.probe() is None

    def probe(self) -> str | None:
        """Return the next command of cocor-eval that has not been run."""
        record = self.record()
        return next((name for name, data in self.probes.items() if record.get(name) != str(data)), None)

    def mark(self) -> None:
        """Record that the run is trained or, if that was recorded before, evaluated."""
        flags = {key: str(value) for key, value in self.flags.items()}
        new = {"flags": flags, "settings": self.settings, "machine": describe_machine()}
        record, probe = self.record(), self.probe()
        write_json(self.beside("done.json"), record | {probe: str(self.probes[probe])} if record and probe else new)

    def command(self) -> list[str]:
        """Return the command of the training or, once that is done, of the evaluation."""
        words, values = ["cocor.train"], self.flags | {"output": self.folder, "resume": "auto"}
        if self.record() and (probe := self.probe()):  # architecture, stem and size are stored with the weights
            words, gpu = ["cocor.eval.cli", probe, str(self.folder)], "yes" if int(self.flags["gpus"]) else "no"
            values = {"data": self.probes[probe], "output": self.folder / probe, "gpu": gpu}
        return [sys.executable, "-P", "-m", *words, *(f"{flag(key)}={value}" for key, value in values.items())]


def run_all(
    trainings: Sequence[Training], jobs: int, gpus: int, deadline: float, say: Callable[[str], None] = print
) -> dict[str, str]:
    """Do what is not done, ``jobs`` at a time; return why runs are unfinished."""
    waiting, slots = [training for training in trainings if not training.is_done()], SimpleQueue[int]()
    running, unfinished = set[subprocess.Popen[bytes]](), dict[str, str]()
    ending, lock = threading.Event(), threading.Lock()
    say(f"{len(trainings)} runs, {len(trainings) - len(waiting)} of them done, {jobs} at a time")

    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(gpus)))).split(",")
    shared = {"OMP_NUM_THREADS": "1"} if jobs > 1 and not gpus else {}

    def execute(training: Training, slot: int, name: str) -> int:
        probe = training.probe() if training.record() else None
        output = training.beside(f"{probe}.txt" if probe else "txt")
        output.parent.mkdir(parents=True, exist_ok=True)
        streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stderr": subprocess.STDOUT, "start_new_session": True}
        # unbuffered, else the reason of a failure may not be the last line
        environment = shared | os.environ | {"PYTHONUNBUFFERED": "1"}
        environment |= {"CUDA_VISIBLE_DEVICES": visible[slot % gpus]} if gpus else {}
        with lock, output.open("wb") as file:
            if ending.is_set():
                return signals.STOPPED
            process = subprocess.Popen(training.command(), env=environment, stdout=file, **streams)
            running.add(process)
        say(f"started {name}{f': {probe} probe' if probe else ''}")
        code = process.wait()
        running.remove(process)
        if code and code not in _STOPPED:
            unfinished[name] = output.read_text(errors="replace").strip().rpartition("\n")[2] or f"exit code {code}"
        return code

    def complete(training: Training) -> None:
        slot, code, name = slots.get(), 0, training.folder.name
        try:
            while not code and not training.is_done():
                code = execute(training, slot, name)
                if not code:
                    training.mark()
        finally:
            slots.put(slot)
        why = unfinished.setdefault(name, STOPPED) if code else ""
        say(f"{why and 'not '}finished {name}{why and f': {why}'}")

    heeded = [number for number in signals.SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]  # not nohup's
    before = {number: signal.signal(number, signal.default_int_handler) for number in heeded}
    for slot in range(jobs):
        slots.put(slot)
    with ThreadPoolExecutor(jobs) as pool:
        futures = [pool.submit(complete, training) for training in waiting]
        try:
            wait(futures, min(max(0.0, deadline - time.monotonic()), threading.TIMEOUT_MAX))
        finally:
            with lock:
                ending.set()
            for process in list(running):
                process.terminate()
            wait(futures, _PATIENCE)
            for process in list(running):
                process.kill()
            for number, handler in before.items():
                signal.signal(number, handler)
    for future in futures:
        future.result()  # raises what went wrong here
    return unfinished
