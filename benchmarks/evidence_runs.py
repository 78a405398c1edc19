"""The trainings of a study as processes: so many at a time, resumed if they were stopped, skipped if they are done.

Every run is ``cocor-train`` in a folder of its own, started with ``--resume``. Beside the folder of run NAME,
``NAME.txt`` keeps what it prints, and ``NAME.done.json`` marks it as finished and holds its flags, so that a study that
is started again with other flags does not mix results.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cocor import atomic, stop
from cocor.cli import flag
from loaders.errors import UserError

_PATIENCE = 120.0  # seconds for a run to write its checkpoint and stop
_LOOK = 0.2  # seconds between two looks at the processes


@dataclass(frozen=True)
class Training:
    """A run: its place in the study, its folder and its flags but for ``output`` and ``resume``."""

    method: str
    variant: str
    seed: int
    folder: Path
    flags: dict[str, Any]

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def output(self) -> Path:
        """What it prints."""
        return self.folder.with_name(f"{self.name}.txt")

    @property
    def _marker(self) -> Path:
        return self.folder.with_name(f"{self.name}.done.json")

    def is_done(self) -> bool:
        """UserError if the folder holds a finished run with other flags."""
        if not self._marker.is_file():
            return False
        done = json.loads(self._marker.read_text())
        if done != self._asked():
            changed = sorted(key for key in done.keys() | self._asked() if done.get(key) != self._asked().get(key))
            raise UserError(f"{self.folder}: a finished run with other {', '.join(changed)}; choose another --output")
        return True

    def mark_done(self) -> None:
        atomic.write_text(self._marker, json.dumps(self._asked(), indent=1) + "\n")

    def command(self) -> list[str]:
        values = self.flags | {"output": self.folder, "resume": "auto"}
        return [sys.executable, "-m", "cocor.train", *(f"{flag(key)}={value}" for key, value in values.items())]

    def _asked(self) -> dict[str, str]:
        """What decides the result: how many threads read the data does not."""
        return {key: str(value) for key, value in self.flags.items() if key != "workers"}


@dataclass
class _Process:
    training: Training
    process: subprocess.Popen[bytes]
    place: int


class Crew:
    """Runs trainings, ``jobs`` at a time, each in turn on one of ``gpus`` (0: on the CPU).

    ``deadline``, in seconds of ``time.monotonic``: then the runs are asked to write a checkpoint and stop.
    """

    def __init__(self, jobs: int, gpus: int, deadline: float | None, say: Callable[[str], None] = print) -> None:
        self._jobs, self._gpus, self._deadline, self._say = jobs, gpus, deadline, say
        self._running: list[_Process] = []
        self.failed: dict[str, str] = {}  # run -> why
        self.stopped: list[str] = []

    def run(self, trainings: Sequence[Training]) -> None:
        """Do all that is not done yet. Ctrl-C or SIGTERM stop the runs, resumably, and then this process."""
        waiting = [training for training in trainings if not training.is_done()]
        self._say(f"{len(trainings)} runs, {len(trainings) - len(waiting)} of them done, {self._jobs} at a time")
        before = signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            while waiting or self._running:
                if self._deadline is not None and time.monotonic() > self._deadline:
                    self.stopped += [training.name for training in waiting]
                    waiting = []
                    self._stop()
                while waiting and len(self._running) < self._jobs:
                    self._start(waiting.pop(0))
                time.sleep(_LOOK)
                self._collect()
        finally:
            self._stop()
            signal.signal(signal.SIGTERM, before)

    def _start(self, training: Training) -> None:
        taken = [running.place for running in self._running]
        place = next(place for place in range(self._jobs) if place not in taken)
        environment = dict(os.environ)
        root = str(Path(__file__).resolve().parent.parent)
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [root, environment.get("PYTHONPATH")]))
        if self._gpus:
            visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(self._gpus)))).split(",")
            environment["CUDA_VISIBLE_DEVICES"] = visible[place % self._gpus]
        elif self._jobs > 1:
            environment.setdefault("OMP_NUM_THREADS", "1")
        training.folder.parent.mkdir(parents=True, exist_ok=True)
        with training.output.open("wb") as output:
            process = subprocess.Popen(
                training.command(), env=environment, stdin=subprocess.DEVNULL, stdout=output,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        self._running.append(_Process(training, process, place))
        self._say(f"started {training.name}")

    def _collect(self) -> None:
        for running in list(self._running):
            code = running.process.poll()
            if code is None:
                continue
            self._running.remove(running)
            training = running.training
            if code == 0:
                training.mark_done()
                self._say(f"finished {training.name}")
            elif code in (stop.STOPPED, stop.INTERRUPTED):
                self.stopped.append(training.name)
            else:
                self.failed[training.name] = _last_line(training.output, code)
                self._say(f"failed {training.name}: {self.failed[training.name]}")

    def _stop(self) -> None:
        for running in self._running:
            running.process.terminate()
        end = time.monotonic() + _PATIENCE
        while self._running and time.monotonic() < end:
            time.sleep(_LOOK)
            self._collect()
        for running in self._running:
            running.process.kill()
            self.stopped.append(running.training.name)
        self._running.clear()


def _last_line(file: Path, code: int) -> str:
    lines = [line for line in file.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1].strip() if lines else f"exit code {code}"
