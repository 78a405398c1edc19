"""Send a run's log to experiment trackers (``--track tensorboard,wandb,mlflow``).

    RunLog.event -> Tracking -> a queue and a thread for each tracker -> event files, wandb, MLflow

Training never waits for a tracker, and goes on without one that fails, after one warning. A resumed run continues its
curves: the ids that wandb and MLflow know it by are kept in the run's folder.

    runs/NAME/tracking/  events.out.tfevents.*  wandb/  wandb.id  mlflow.id
"""

import importlib.util
import logging
import os
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from queue import Full, Queue
from threading import Thread
from typing import Any

import numpy as np
import yaml
from PIL import Image

from cocor.log import PICTURE
from cocor.run_dir import TRACKING
from loaders.errors import UserError
from loaders.files import write_text

_PROJECT = "cocor"  # of wandb, and experiment of MLflow, unless the environment names another
_SYSTEM = ("images_per_s", "data_wait_share", "time_left_s", "gpu_memory_gib")
_NO_CURVES = ("kind", "step", "time_s")
_MOST_WAITING = 10_000  # records that a tracker may lag behind
_PATIENCE = 30.0  # seconds for the last records at the end of a run
_MOST_PARAMS = 100  # that MLflow takes at once
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Tracked:
    """Run to track: its folder, its options, and the ``step`` it goes on from."""

    folder: Path
    options: Mapping[str, Any]
    step: int


class Tracker(ABC):
    """Tool that shows runs; ``known`` is the id of this one if it resumes."""

    @abstractmethod
    def __init__(self, run: Tracked, known: str | None) -> None: ...

    id = ""

    @abstractmethod
    def numbers(self, values: Mapping[str, float], step: int, seconds: float) -> None:
        """Add a point to each curve, made at ``seconds`` since the epoch."""

    @abstractmethod
    def picture(self, path: Path, step: int) -> None: ...

    @abstractmethod
    def close(self, finished: bool) -> None:
        """Send the rest; ``finished``: the run is at its end."""


class TensorBoard(Tracker):
    """Event files in the run's folder: ``tensorboard --logdir runs``."""

    def __init__(self, run: Tracked, known: str | None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(run.folder / TRACKING, purge_step=run.step + 1, flush_secs=10)
        text = yaml.safe_dump(dict(run.options), sort_keys=False)
        self._writer.add_text("configuration", f"```\n{text}```", run.step)

    def numbers(self, values: Mapping[str, float], step: int, seconds: float) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step, walltime=seconds)

    def picture(self, path: Path, step: int) -> None:
        with Image.open(path) as image:
            self._writer.add_image(path.stem, np.asarray(image.convert("RGB")), step, dataformats="HWC")

    def close(self, finished: bool) -> None:
        self._writer.close()


class WandB(Tracker):
    """Weights & Biases, as ``WANDB_MODE``, ``WANDB_PROJECT`` and ``wandb login`` say."""

    def __init__(self, run: Tracked, known: str | None) -> None:
        import wandb

        self.id = known or uuid.uuid4().hex[:8]
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", _PROJECT), name=run.folder.resolve().name, id=self.id,
            resume="allow", config=dict(run.options), allow_val_change=True, dir=run.folder / TRACKING,
            settings=wandb.Settings(silent=True, console="off"),
        )  # fmt: skip
        # wandb's own step cannot go back to the checkpoint from which a killed run resumes.
        self._run.define_metric("*", step_metric="step")
        place = f"wandb sync {Path(self._run.dir).parent}" if self._run.offline else self._run.url
        _log.info(f"wandb: {place}")

    def numbers(self, values: Mapping[str, float], step: int, seconds: float) -> None:
        self._run.log({**values, "step": step})

    def picture(self, path: Path, step: int) -> None:
        from wandb import Image as Picture

        self._run.log({path.stem: Picture(str(path)), "step": step})

    def close(self, finished: bool) -> None:
        self._run.finish(exit_code=0 if finished else 1)


class MLflow(Tracker):
    """MLflow, at ``MLFLOW_TRACKING_URI`` and in ``MLFLOW_EXPERIMENT_NAME``."""

    def __init__(self, run: Tracked, known: str | None) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Param

        logging.getLogger("urllib3").setLevel(logging.ERROR)  # which warns of every retry
        self._client = MlflowClient()
        if known is not None:
            self.id = known
            self._client.update_run(known, status="RUNNING")
            return
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", _PROJECT)
        experiment = self._client.get_experiment_by_name(name)
        where = self._client.create_experiment(name) if experiment is None else experiment.experiment_id
        self.id = self._client.create_run(where, run_name=run.folder.resolve().name).info.run_id
        parameters = [Param(key, str(value)) for key, value in run.options.items()]
        for at in range(0, len(parameters), _MOST_PARAMS):
            self._client.log_batch(self.id, params=parameters[at : at + _MOST_PARAMS])

    def numbers(self, values: Mapping[str, float], step: int, seconds: float) -> None:
        from mlflow.entities import Metric

        metrics = [Metric(name, value, int(1000 * seconds), step) for name, value in values.items()]
        self._client.log_batch(self.id, metrics=metrics)

    def picture(self, path: Path, step: int) -> None:
        self._client.log_artifact(self.id, str(path))

    def close(self, finished: bool) -> None:
        self._client.set_terminated(self.id, "FINISHED" if finished else "KILLED")


_TRACKERS: dict[str, type[Tracker]] = {"tensorboard": TensorBoard, "wandb": WandB, "mlflow": MLflow}


def check(names: Collection[str]) -> None:
    """Raise a UserError if a tracker in ``names`` is not installed."""
    for name in names:
        found = importlib.util.find_spec(name)
        if found is None or found.origin is None:  # the latter for a folder of that name, which wandb leaves behind
            raise UserError(f"--track {name}: is not installed: pip install {name}")


class Tracking:
    """Pass the records of a run on to the trackers ``names``."""

    def __init__(self, names: Collection[str], run: Tracked) -> None:
        self._folder = run.folder
        if names:
            (run.folder / TRACKING).mkdir(exist_ok=True)
        self._workers = [_Worker(name, run) for name in names]
        for worker in self._workers:
            worker.start()

    def __call__(self, record: Mapping[str, Any]) -> None:
        """Send the numbers of a line of metrics.jsonl, or the picture that it names."""
        step, seconds = record["step"], record["time_s"]
        if record["kind"] == PICTURE:
            path = self._folder / record["file"]
            self._send(lambda tracker: tracker.picture(path, step))
        elif values := _curves(record):
            self._send(lambda tracker: tracker.numbers(values, step, seconds))

    def close(self, finished: bool) -> None:
        """End all trackers; wait for them, but not for ever."""
        self._send(lambda tracker: tracker.close(finished))
        for worker in self._workers:
            worker.end()

    def _send(self, job: Callable[[Tracker], None]) -> None:
        for worker in self._workers:
            worker.send(job)


def _curves(record: Mapping[str, Any]) -> dict[str, float]:
    """Name a record's numbers: ``train/loss``, ``knn/accuracy``, ``system/images_per_s``."""
    return {
        f"{'system' if key in _SYSTEM else record['kind']}/{key}": value
        for key, value in record.items()
        if key not in _NO_CURVES and isinstance(value, int | float)
    }


class _Worker(Thread):
    """Thread that starts and serves one tracker, which may be slow or fail."""

    def __init__(self, tool: str, run: Tracked) -> None:
        super().__init__(name=f"track {tool}", daemon=True)
        self._tool, self._tracked, self._off = tool, run, False
        self._jobs: Queue[Callable[[Tracker], None] | None] = Queue(_MOST_WAITING)

    def send(self, job: Callable[[Tracker], None] | None) -> None:
        if not self._off:
            try:
                self._jobs.put_nowait(job)
            except Full:
                self._fail("it does not keep up")

    def end(self) -> None:
        self.send(None)
        self.join(_PATIENCE)
        if self.is_alive() and not self._off:
            self._fail(f"it has not taken everything within {_PATIENCE:.0f} s")

    def run(self) -> None:
        try:
            tracker = self._start()
            while (job := self._jobs.get()) is not None and not self._off:
                job(tracker)
        except Exception as error:  # whatever such a tool raises, it must not end the run
            self._fail(" ".join(str(error).split())[:300].rstrip(".") or type(error).__name__)

    def _start(self) -> Tracker:
        file = self._tracked.folder / TRACKING / f"{self._tool}.id"
        tracker = _TRACKERS[self._tool](self._tracked, file.read_text().strip() if file.exists() else None)
        if tracker.id:
            write_text(file, tracker.id + "\n")
        return tracker

    def _fail(self, reason: str) -> None:
        self._off = True
        _log.warning(f"--track {self._tool}: {reason}; the run goes on without it")
