"""Watches a run's health: losses that are not finite, collapsed features, an MMNN that cannot learn, falling k-NN
accuracy.

A few scalars of every step, and the indices of its samples, stay on the device; they are read together, every ``EVERY``
steps and before every checkpoint. Findings are logged, and a step without a finite loss is recorded with its samples:

    faults.jsonl   {"kind": "loss not finite", "step": 1234, "losses": [{"loss": ...} per rank], "samples": [...], ...}
"""

import json
import logging
import math
from collections import deque
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from cocor.config.options import Config
from cocor.distributed.collectives import World, gather
from cocor.methods import method_class
from cocor.step.step import Metrics
from loaders.batch import Batch
from loaders.errors import UserError
from loaders.text import printable

FILE = "faults.jsonl"
EVERY = 50  # steps
MOST_SKIPPED = 50  # steps in succession
FLAT_STD = 0.02  # of features whose standard deviation would be 1 if they were spread over the sphere
NEAR_CHANCE = 0.005  # relative distance of the loss from that of guessing
FALLEN = 0.75  # of the best k-NN accuracy; a fall must also exceed five standard errors of the queries' accuracy
DEAD_GRADIENT = 1e-8  # norm of the MMNN's gradient over the encoder's learning rate; 1e-3 where the MMNN learns
_LOSSES = ("loss", "contrastive_loss", "consistency_loss", "labelled_loss")
_COLUMNS = (*_LOSSES, "contrastive_feature_std", "hypergradient_norm", "skipped")  # not every step has all of them
_log = logging.getLogger(__name__)


class Watch:
    """Watches the steps of a run; every rank has one and calls it in the same steps.

    Args:
        names: of the training images, for messages.
    """

    def __init__(self, config: Config, world: World, names: list[str]) -> None:
        self._config, self._world, self._image_names = config, world, names
        self._rows = self._samples = torch.empty(0)  # of the steps since the last look, see __call__
        self._labelled: Tensor | None = None
        self._nothing = torch.zeros((), device=world.device)
        self._filled: list[tuple[frozenset[str], bool]] = []  # per row: its metrics; had it a labelled batch
        self._last_step = 0
        self._skipped_in_a_row = 0
        self._recent: deque[dict[str, float]] = deque(maxlen=EVERY)
        self._warned: set[str] = set()
        self._best_knn = (0.0, 0)  # accuracy, and after how many epochs

    def __call__(self, step: int, metrics: Metrics, batch: Batch, labelled: Batch | None, learning_rate: float) -> None:
        """Store the metrics of finished step number ``step``, and :meth:`look` at them every ``EVERY`` steps.

        Raises:
            UserError: a loss was not finite (``--on-nan stop``), or ``MOST_SKIPPED`` in a row were not.
        """
        if not len(self._rows):
            self._rows = torch.empty(EVERY, len(_COLUMNS), device=self._world.device)
            self._samples = batch.index.new_empty(EVERY, len(batch.index))
        at = len(self._filled)
        values = [metrics.get(name, self._nothing).detach().float() for name in _COLUMNS]
        torch.stack(values, out=self._rows[at])
        self._samples[at] = batch.index
        if labelled is not None:
            if self._labelled is None:
                self._labelled = labelled.index.new_empty(EVERY, len(labelled.index))
            self._labelled[at] = labelled.index
        self._filled.append((frozenset(metrics), labelled is not None))
        self._last_step = step
        if len(self._filled) == EVERY:
            self.look(learning_rate)

    def look(self, learning_rate: float) -> None:
        """Examine the steps stored since the last look. Raises as a call does."""
        filled, self._filled = self._filled, []
        if not filled:
            return
        values = gather(self._rows[None, : len(filled)]).tolist()  # (ranks, steps, columns)
        for at, (names, labelled) in enumerate(filled):
            rows = [{name: v for name, v in zip(_COLUMNS, rank[at], strict=True) if name in names} for rank in values]
            mean = {name: sum(row[name] for row in rows) / len(rows) for name in rows[0]}
            if not all(math.isfinite(mean.get(name, 0.0)) for name in _LOSSES) or mean.get("skipped", 0) > 0:
                self._not_finite(at, self._last_step - len(filled) + 1 + at, rows, labelled)
            else:
                self._skipped_in_a_row = 0
                self._recent.append(mean)
        self._warn_of_collapse(learning_rate)

    def see_knn(self, accuracy: float, queries: int, epoch: int) -> None:
        """Warn if k-NN ``accuracy`` of ``queries`` images, after ``epoch`` epochs, is far below the best since this
        process started. Features can degrade while their spread and the loss stay fine, as SimSiam's do at high
        learning rates."""
        best, when = self._best_knn
        if accuracy > best:
            self._best_knn = accuracy, epoch
        elif accuracy < FALLEN * best and best - accuracy > 5 * math.sqrt(best * (1 - best) / queries):
            finding = f"k-NN accuracy has fallen from {best:.1%} after {when} epochs to {accuracy:.1%} after {epoch}"
            self._warn("k-NN", f"{finding}: the features get worse; try a lower --lr")

    def _not_finite(self, at: int, step: int, losses: list[dict[str, float]], labelled: bool) -> None:
        """Record step ``step``, in row ``at``, with the ``losses`` of each rank, and warn or raise. ``labelled``: the
        step had a labelled batch."""
        samples = gather(self._samples[at]).tolist()
        others = gather(self._labelled[at]).tolist() if labelled and self._labelled is not None else []
        self._recent.clear()
        if self._world.main:
            names = [printable(self._image_names[index]) for index in samples]
            content = {"losses": list(map(_plain, losses)), "samples": samples, "names": names}
            content |= {"labelled_samples": others}
            _append(self._config.output / FILE, {"kind": "loss not finite", "step": step, **content})
        finding = f"the loss is not finite at step {step}"
        remedy = f"lower --lr, or try --precision fp32; the step's samples are in {self._config.output / FILE}"
        if self._config.on_nan == "stop":
            raise UserError(f"{finding}: {remedy}")
        self._skipped_in_a_row += 1
        if self._skipped_in_a_row >= MOST_SKIPPED:
            raise UserError(f"{finding}, nor in the {MOST_SKIPPED - 1} before: {remedy}")
        if self._world.main:
            _log.warning(f"{finding}: its update is left out; its samples are in {self._config.output / FILE}")

    def _warn_of_collapse(self, learning_rate: float) -> None:
        if len(self._recent) < EVERY or not self._world.main:
            return
        steps = f"in the {EVERY} steps up to {self._last_step}"
        names = set().union(*self._recent)
        rows = {name: [row[name] for row in self._recent if name in row] for name in names}
        mean = {name: sum(values) / len(values) for name, values in rows.items()}
        spread = mean.get("contrastive_feature_std", 1.0)
        if spread < FLAT_STD:
            self._warn("collapse", f"the features have collapsed: standard deviation {spread:.2g} of 1 {steps}")
        formula, chance = method_class(self._config.method).chance_loss(self._config) or ("", math.inf)
        if abs(mean["contrastive_loss"] / chance - 1) < NEAR_CHANCE:
            self._warn("chance", f"the contrastive loss is that of guessing, {formula} = {chance:.3f}, {steps}")
        norm = max(rows.get("hypergradient_norm", [math.inf]))
        if learning_rate > 0 and norm < DEAD_GRADIENT * learning_rate:
            self._warn("dead MMNN", f"the MMNN does not learn: no gradient of more than {norm:.2g} {steps}")

    def _warn(self, kind: str, message: str) -> None:
        """Log a warning once per kind: a lasting state would otherwise fill the log."""
        if kind not in self._warned:
            self._warned.add(kind)
            _log.warning(message)


def _plain(values: dict[str, float]) -> dict[str, float | str]:
    """Values that are not finite as strings, since JSON has no infinities."""
    return {name: value if math.isfinite(value) else str(value) for name, value in values.items()}


def _append(path: Path, record: dict[str, object]) -> None:
    with suppress(OSError), path.open("a", encoding="utf-8") as file:  # the message must get out, disk full or not
        file.write(json.dumps(record, allow_nan=False) + "\n")
