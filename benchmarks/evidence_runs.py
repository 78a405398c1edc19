"""The trainings of a study as processes: a few at a time, resumed if they were stopped, skipped if they are done.

    cocor-train in a folder of its own, with --resume  ->  cocor-eval linear on the same GPU, if it is asked for

Beside the folder of run NAME, ``NAME.txt`` keeps what the training prints, and ``NAME.done.json`` marks it as finished
and holds its flags, all settings that resulted from them, and the machine. So a study that is continued with other
flags, after an edit of a configuration file, or with newer defaults, does not mix results. ``NAME.linear.txt`` and
``NAME.linear.json`` do the same for the evaluation, whose result is ``NAME/linear/linear.json``. Until it has finished,
its features are cached there as well, so that they need not be computed again after a stop.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from cocor import atomic
from cocor.config.options import Config
from cocor.config.parse import flag
from cocor.distributed import signals
from common import describe_machine
from loaders.errors import UserError

_PATIENCE = 120.0  # seconds for a run to write its checkpoint and stop
_LOOK = 0.2  # seconds between two looks at the processes
_SETTINGS, _MACHINE = "all settings", "machine"  # in a marker, among flags
# Exit codes after a signal: of cocor-train and cocor-eval, and of both before their handlers are in place.
_STOPPED = {signals.STOPPED, signals.INTERRUPTED, 128 + signal.SIGTERM, -signal.SIGTERM, -signal.SIGINT}


@dataclass(frozen=True)
class Training:
    """A run of a study: its folder and its flags except ``output`` and ``resume``. ``linear`` names the images, as
    ``cocor-eval --data`` takes them, on which it is evaluated after training. ``settings`` are all values that affect
    its steps, whether they come from flags, file or defaults; ``machine`` is where it was trained, once it was."""

    method: str
    variant: str
    seed: int
    folder: Path
    flags: dict[str, Any]
    linear: Path | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    machine: dict[str, Any] | None = None

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def result(self) -> Path:
        """The file that the linear probe writes."""
        return self.folder / "linear" / "linear.json"

    def is_done(self) -> bool:
        """Trained, and evaluated if that is asked for."""
        return self.is_trained() and (self.linear is None or self._is_evaluated())

    def is_trained(self) -> bool:
        """UserError if the folder holds a finished run with other flags or settings."""
        done = self._done()
        if done is None:
            return False
        flags, settings, _ = done
        asked = self._asked()
        changed = {key for key in flags.keys() | asked if flags.get(key) != asked.get(key)}
        default = Config().to_dict()  # of keys that came later; what was marked before there were settings has none
        changed |= {
            key for key, value in self.settings.items() if settings and settings.get(key, default[key]) != value
        }
        if changed:
            words = ", ".join(sorted(changed))
            raise UserError(f"{self.folder}: a finished run with other {words}; choose another --output")
        return True

    def as_recorded(self) -> "Training | None":
        """The run as it was trained and evaluated, whatever is asked for now; None if it is not trained."""
        evaluated, done = self._beside("linear.json"), self._done()
        if done is None:
            return None
        linear = json.loads(evaluated.read_text())["linear"] if evaluated.is_file() else None
        flags, settings, machine = done
        return replace(self, flags=flags, settings=settings, machine=machine, linear=linear and Path(linear))

    def mark(self) -> None:
        """Record that the run is trained or, if that was recorded before, evaluated."""
        evaluated = self._beside("linear.json")
        if self.is_trained():
            shutil.rmtree(self._features, ignore_errors=True)
            atomic.write_text(evaluated, json.dumps({"linear": str(self.linear)}) + "\n")
        else:
            evaluated.unlink(missing_ok=True)  # of former weights
            done = {**self._asked(), _SETTINGS: self.settings, _MACHINE: describe_machine()}
            atomic.write_text(self._beside("done.json"), json.dumps(done, indent=1) + "\n")

    def command(self) -> list[str]:
        """The training, or the evaluation if the run is trained."""
        return self._evaluation() if self.is_trained() else self._training()

    def output(self) -> Path:
        """The file for what :meth:`command` prints."""
        return self._beside("linear.txt" if self.is_trained() else "txt")

    def _training(self) -> list[str]:
        values = self.flags | {"output": self.folder, "resume": "auto"}
        return [sys.executable, "-P", "-m", "cocor.train", *(f"{flag(key)}={value}" for key, value in values.items())]

    def _evaluation(self) -> list[str]:
        """Architecture, stem and image size are stored with the weights."""
        values = {
            "data": self.linear,
            "output": self.result.parent,
            "cache": self._features,
            "gpu": "yes" if int(self.flags["gpus"]) else "no",
            "workers": self.flags["workers"],
        }
        flags = (f"{flag(key)}={value}" for key, value in values.items())
        return [sys.executable, "-P", "-m", "cocor.eval.cli", "linear", str(self.folder), *flags]

    @property
    def _features(self) -> Path:
        return self.folder / "linear" / "features"

    def _is_evaluated(self) -> bool:
        marker = self._beside("linear.json")
        if not (marker.is_file() and self.result.is_file()):
            return False
        return bool(json.loads(marker.read_text()) == {"linear": str(self.linear)})

    def _beside(self, ending: str) -> Path:
        return self.folder.with_name(f"{self.name}.{ending}")

    def _done(self) -> tuple[dict[str, str], dict[str, Any], dict[str, Any] | None] | None:
        """Flags, settings and machine of the finished run in the folder."""
        marker = self._beside("done.json")
        if not marker.is_file():
            return None
        flags = json.loads(marker.read_text())
        return flags, flags.pop(_SETTINGS, {}), flags.pop(_MACHINE, None)

    def _asked(self) -> dict[str, str]:
        """The flags that decide the result, as text: all but the number of threads that read data."""
        return {key: str(value) for key, value in self.flags.items() if key != "workers"}


@dataclass
class _Process:
    training: Training
    process: subprocess.Popen[bytes]
    slot: int
    output: Path


class Crew:
    """Runs trainings in ``jobs`` slots, which are spread over ``gpus`` (0: the CPU).

    At ``deadline``, in seconds of ``time.monotonic``, the runs are asked to write a checkpoint and stop.
    """

    def __init__(self, jobs: int, gpus: int, deadline: float | None, say: Callable[[str], None] = print) -> None:
        self._jobs, self._gpus, self._deadline, self._say = jobs, gpus, deadline, say
        self._running: list[_Process] = []
        self._ending = False
        self.failed: dict[str, str] = {}  # run -> why
        self.stopped: list[str] = []

    def run(self, trainings: Sequence[Training]) -> None:
        """Do all that is not done yet. A signal, also a closed terminal's or Slurm's, stops the runs, which can be
        resumed, and then this process: in sessions of their own the runs would go on without it."""
        waiting = [training for training in trainings if not training.is_done()]
        self._say(f"{len(trainings)} runs, {len(trainings) - len(waiting)} of them done, {self._jobs} at a time")
        before = {number: signal.getsignal(number) for number in signals.SIGNALS}
        for number, handler in before.items():
            if handler is not signal.SIG_IGN:  # as under nohup
                signal.signal(number, signal.default_int_handler)
        try:
            while waiting or self._running:
                if self._deadline is not None and time.monotonic() > self._deadline:
                    self.stopped += [training.name for training in waiting]
                    waiting = []
                    self._stop()
                while waiting and len(self._running) < self._jobs:
                    taken = [running.slot for running in self._running]
                    free = next(slot for slot in range(self._jobs) if slot not in taken)
                    self._start(waiting.pop(0), free)
                time.sleep(_LOOK)
                self._collect()
        except KeyboardInterrupt:
            self._say(f"stopping {len(self._running)} runs: the same command goes on from there")
            raise
        finally:
            self._stop()
            self._ending = False
            for number, handler in before.items():
                signal.signal(number, handler)

    def _start(self, training: Training, slot: int) -> None:
        environment = os.environ | {"PYTHONUNBUFFERED": "1"}  # else the reason of a failure may not be the last line
        root = str(Path(__file__).resolve().parent.parent)
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [root, environment.get("PYTHONPATH")]))
        if self._gpus:
            visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(self._gpus)))).split(",")
            environment["CUDA_VISIBLE_DEVICES"] = visible[slot % self._gpus]
        elif self._jobs > 1:
            environment.setdefault("OMP_NUM_THREADS", "1")
        training.folder.parent.mkdir(parents=True, exist_ok=True)
        path = training.output()
        with path.open("wb") as output:
            process = subprocess.Popen(
                training.command(), env=environment, stdin=subprocess.DEVNULL, stdout=output,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        self._running.append(_Process(training, process, slot, path))
        self._say(f"started {training.name}{': linear probe' if training.is_trained() else ''}")

    def _collect(self) -> None:
        for running in list(self._running):
            code = running.process.poll()
            if code is None:
                continue
            self._running.remove(running)
            training = running.training
            if code == 0:
                training.mark()
                if training.is_done():
                    self._say(f"finished {training.name}")
                elif self._ending:
                    self.stopped.append(training.name)
                else:
                    self._start(training, running.slot)
            elif code in _STOPPED:
                self.stopped.append(training.name)
            else:
                self.failed[training.name] = _last_line(running.output, code)
                self._say(f"failed {training.name}: {self.failed[training.name]}")

    def _stop(self) -> None:
        self._ending = True
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
