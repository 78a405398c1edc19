"""Monitor the health of a run, and undo the steps that went wrong.

Warn of collapsed features, of an MMNN that cannot learn or does not move its targets, and of falling k-NN accuracy;
stop at losses that are not finite, or skip such steps (``--on-nan skip``). A step without a finite loss is recorded
with its samples:

    faults.jsonl   {"kind": "loss not finite", "step": 1234, "losses": [{"loss": ...} per rank], "samples": [...], ...}
"""

import json
import logging
import math
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from cocor.config.options import Config
from cocor.distributed.collectives import World, gather, mean_over_ranks
from cocor.methods import method_class
from cocor.step.compile import Step
from cocor.step.step import Metrics, TrainingStep
from loaders.batch import Batch
from loaders.errors import UserError
from loaders.text import counted, printable

FILE = "faults.jsonl"
EVERY = 50  # steps
MOST_SKIPPED = 50  # steps in succession
FLAT_STD = 0.02  # of features whose standard deviation would be 1 if they were spread over the sphere
NEAR_CHANCE = 0.005  # relative distance of the loss from that of guessing
FALLEN = 0.75  # of the best k-NN accuracy; a fall must also exceed five standard errors of the queries' accuracy
DEAD_GRADIENT = 1e-8  # norm of the MMNN's gradient over the encoder's learning rate; 1e-3 where the MMNN learns
STILL, NEAR = 0.002, 0.02  # movement of targets that have not moved; distance of a target that is at its similarity
_LOSSES = ("loss", "contrastive_loss", "consistency_loss", "auxiliary_loss", "labelled_loss")
_COLUMNS = (*_LOSSES, "contrastive_feature_std", "hypergradient_norm", "skipped")  # not every step has all of them
_log = logging.getLogger(__name__)


class HealthMonitor:
    """Check the steps of a run; every rank has one and calls it in the same steps.

    Args:
        names: of the training images, for messages.
    """

    def __init__(self, config: Config, world: World, names: list[str]) -> None:
        self._config, self._world, self._image_names = config, world, names
        self._steps_per_epoch = max(1, len(names) // config.batch_size)
        by_length = ("similarity", "target", "target_moved")
        self._columns = (*_COLUMNS, *(f"{name}_{length}" for name in by_length for length in config.lengths))
        self._rows = self._samples = torch.empty(0)  # of the steps since the last check, see __call__
        self._labelled: Tensor | None = None
        self._nothing = torch.zeros((), device=world.device)
        self._filled: list[tuple[frozenset[str], bool]] = []  # per row: its metrics; had it a labelled batch
        self._last_step = 0
        self._skipped_in_a_row = 0
        self._recent: deque[dict[str, float]] = deque(maxlen=EVERY)
        self._warned: set[str] = set()
        self.best_knn = (0.0, 0)  # accuracy, and after how many epochs; in checkpoints

    def __call__(self, step: int, metrics: Metrics, batch: Batch, labelled: Batch | None, learning_rate: float) -> None:
        """Store the metrics of finished step number ``step``; :meth:`check` them every ``EVERY`` steps.

        Raises:
            UserError: a loss was not finite (``--on-nan stop``), or ``MOST_SKIPPED`` in a row were not.
        """
        # Metrics and sample indices stay on the device and are read together: one wait for it in EVERY steps.
        if not len(self._rows):
            self._rows = torch.empty(EVERY, len(self._columns), device=self._world.device)
            self._samples = batch.index.new_empty(EVERY, len(batch.index))
        at = len(self._filled)
        values = [metrics.get(name, self._nothing).detach().float() for name in self._columns]
        torch.stack(values, out=self._rows[at])
        self._samples[at] = batch.index
        if labelled is not None:
            if self._labelled is None:
                self._labelled = labelled.index.new_empty(EVERY, len(labelled.index))
            self._labelled[at] = labelled.index
        self._filled.append((frozenset(metrics), labelled is not None))
        self._last_step = step
        if len(self._filled) == EVERY:
            self.check(learning_rate)

    def check(self, learning_rate: float) -> None:
        """Check the steps stored since the last check; raise as a call does."""
        filled, self._filled = self._filled, []
        if not filled:
            return
        values = gather(self._rows[None, : len(filled)]).tolist()  # (ranks, steps, columns)
        for at, (names, labelled) in enumerate(filled):
            rows = [
                {name: v for name, v in zip(self._columns, rank[at], strict=True) if name in names} for rank in values
            ]
            mean = {name: sum(row[name] for row in rows) / len(rows) for name in rows[0]}
            if not all(math.isfinite(mean.get(name, 0.0)) for name in _LOSSES) or mean.get("skipped", 0) > 0:
                self._not_finite(at, self._last_step - len(filled) + 1 + at, rows, labelled)
            else:
                self._skipped_in_a_row = 0
                self._recent.append(mean)
        self._warn_of_collapse(learning_rate)

    def check_knn(self, accuracy: float, queries: int, epoch: int) -> None:
        """Warn if the k-NN accuracy of ``queries`` images has fallen far below the best."""
        # Features can degrade while their spread and the loss stay fine, as SimSiam's do at high learning rates.
        best, when = self.best_knn
        if accuracy > best:
            self.best_knn = accuracy, epoch
        elif accuracy < FALLEN * best and best - accuracy > 5 * math.sqrt(best * (1 - best) / queries):
            peak = f"{best:.1%} after {counted(when, 'epoch')}"
            finding = f"k-NN accuracy has fallen from {peak} to {accuracy:.1%} after {epoch}"
            self._warn("k-NN", f"{finding}: the features get worse; try a lower --lr")

    def _not_finite(self, at: int, step: int, losses: list[dict[str, float]], labelled: bool) -> None:
        """Record step ``step``, stored in row ``at``, with the losses of each rank; warn or raise."""
        samples = gather(self._samples[at]).tolist()
        others = gather(self._labelled[at]).tolist() if labelled and self._labelled is not None else []
        self._recent.clear()
        if self._world.main:
            names = [printable(self._image_names[index]) for index in samples]
            plain = [{name: v if math.isfinite(v) else str(v) for name, v in row.items()} for row in losses]
            record = {"kind": "loss not finite", "step": step, "losses": plain, "samples": samples, "names": names}
            line = json.dumps(record | {"labelled_samples": others}, allow_nan=False) + "\n"  # JSON has no infinities
            # The message must get out, disk full or not.
            with suppress(OSError), (self._config.output / FILE).open("a", encoding="utf-8") as file:
                file.write(line)
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
        self._warn_of_still_targets(mean)

    def _warn_of_still_targets(self, mean: dict[str, float]) -> None:
        """Warn after a tenth of the steps in which the MMNN learns at its full rate."""
        config = self._config
        waited = config.mmnn_wait_epochs + config.mmnn_warmup_epochs
        if self._last_step < self._steps_per_epoch * (waited + (config.epochs - waited) / 10):
            return
        lengths = [length for length in config.lengths if f"target_moved_{length}" in mean]
        moved = max((abs(mean[f"target_moved_{length}"]) for length in lengths), default=math.inf)
        apart = max((abs(mean[f"target_{at}"] - mean[f"similarity_{at}"]) for at in lengths), default=0.0)
        if moved < STILL and apart > NEAR:  # nearer ones have no cause to move
            after = f"after {self._last_step:,} steps they are {moved:.1g} from those before training"
            remedy = "use --mmnn-optimiser adam" if config.mmnn_optimiser == "sgd" else "raise --mmnn-lr"
            self._warn("still targets", f"the MMNN hardly moves its targets: {after}; {remedy}")

    def _warn(self, kind: str, message: str) -> None:
        """Log a warning once per kind."""
        if kind not in self._warned:  # a lasting state would otherwise fill the log
            self._warned.add(kind)
            _log.warning(message)


class SkipNonFinite:
    """Step that is undone where its loss or new weights are not finite.

    Adds the metric ``skipped``: 1 for these, else 0. All that a step changes (weights, momentum buffers, moving
    averages, queue, running statistics) is copied before it, which costs its memory once more, and two copies a step.
    """

    def __init__(self, step: TrainingStep, execute: Step) -> None:
        self._step, self._execute = step, execute
        self._before: dict[str, Tensor] = {}

    @torch.no_grad()
    def __call__(self, batch: Batch, labelled: Batch | None, number: int) -> Metrics:
        for name, tensor in self._state():
            copy = self._before.get(name)
            self._before[name] = tensor.clone() if copy is None else copy.copy_(tensor)
        with torch.enable_grad():
            metrics = self._execute(batch, labelled, number)
        finite = self._finite(metrics["loss"])  # chosen on the device, without waiting for it
        for name, tensor in self._state():
            # Momentum buffers, which an optimiser makes in its first step, would be 0 without it.
            old = self._before.get(name, torch.zeros_like(tensor))
            tensor.copy_(torch.where(finite, tensor, old))
        return metrics | {"skipped": (~finite).float()}

    def _state(self) -> Iterator[tuple[str, Tensor]]:
        """Yield all tensors that a step may change, with their names."""
        # The step's own state_dict would wait for the device, to read learning rates.
        for name, part in self._step.parts().items():
            yield from _tensors(part.state_dict(), name)

    def _finite(self, loss: Tensor) -> Tensor:
        """Return whether the losses of all ranks and the shared weights are finite: bool () on the device."""
        norms = torch._foreach_norm(self._step.weights())
        everything = torch.stack([mean_over_ranks(loss.float()), *(norm.float() for norm in norms)])
        return everything.isfinite().all()


def _tensors(state: Any, place: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in nested dicts and lists, with their paths."""
    if isinstance(state, Tensor):
        yield place, state
    elif isinstance(state, Mapping | list | tuple):
        for key, value in state.items() if isinstance(state, Mapping) else enumerate(state):
            yield from _tensors(value, f"{place}/{key}")
