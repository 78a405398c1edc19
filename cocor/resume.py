"""Save a run to a checkpoint, and resume it: exactly there, or not at all.

A run's position is the number of finished steps; the order of samples and their views follow from it. A run may
therefore resume on another number of ranks and still sees the same global batches. But BatchNorm may then normalise
other numbers of images together: that changes the method, and is refused unless the user asks for it.
"""

import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from cocor import checkpoint
from cocor.config.options import labelled_batch_size
from cocor.data import content_digest, file_states
from cocor.distributed.collectives import barrier, on_main
from cocor.run import Run
from loaders.errors import UserError
from loaders.files import replacing

_LAYOUT = {"ranks": 0, "images a rank": 0}  # the part of geometry() that does not change the method
_log = logging.getLogger(__name__)


def save(run: Run, *, must: bool) -> None:
    """Write a checkpoint and the backbone, on the main rank; the others wait.

    On a full disk that is a warning unless it ``must`` be written: the next one may find more room. UserError
    otherwise, if weights are not finite, or if :mod:`cocor.monitor.health` stops the run.
    """
    run.health.check(run.step.learning_rate)
    if not bool(torch.stack(torch._foreach_norm(run.step.weights())).isfinite().all()):  # the same on all ranks
        raise UserError(f"the weights are not finite after step {run.done}: lower --lr, or try --precision fp32")
    if run.world.main:
        try:
            _write(run)
        except UserError as error:
            if must:
                raise
            _log.warning(f"{error}: no checkpoint of step {run.done}; training goes on, older ones are kept")
    run.saved = time.monotonic()
    barrier()


def save_best(run: Run) -> None:
    """Write ``checkpoints/best.pt``, on the main rank; a failure costs a warning."""
    path = run.config.output / checkpoint.FOLDER / "best.pt"
    try:
        with replacing(path) as temporary:
            checkpoint.write(checkpoint.portable(_state(run)), temporary)
    except UserError as error:
        _log.warning(f"{error}: {path} is that of an earlier step, or missing")


def _state(run: Run) -> dict[str, Any]:
    return {
        "step": run.done,
        "epoch": run.done // run.loader.steps_per_epoch,
        "knn_is_due": run.probes_are_due,
        "best": run.best,
        "best_knn": run.health.best_knn,
        "geometry": geometry(run),
        "training": run.step.state_dict(),
        "labelled": _labelled(run),
        **checkpoint.describe(run.config, run.data.train.digest, run.files),
    }


def _write(run: Run) -> None:
    config, per_epoch, state = run.config, run.loader.steps_per_epoch, _state(run)
    folder, milestones = config.output / checkpoint.FOLDER, config.keep_every_epochs * per_epoch
    checkpoint.save(folder, state, keep=config.keep_checkpoints, milestones=milestones)
    about = {"architecture": config.backbone, "stem": config.stem, "image_size": config.image_size}
    about |= {"mean": list(config.mean), "std": list(config.std), "method": config.method, "step": run.done}
    checkpoint.export_backbone(run.step.method.backbone, config.output / "backbone.safetensors", about)


def restore(run: Run) -> Path | None:
    """Load what ``--resume`` asks for; return its path, or None if there is none.

    UserError if no checkpoint loads, or it is from another run, other images, or ranks that change the method.
    """
    config = run.config
    on_main(lambda: _describe_files(run))
    found = None if config.resume is None else checkpoint.find(config.resume, config.output)
    own = found[1]["step"] if found else 0
    last, first = run.any_rank.now(own, -own)
    if last != -first:  # network file systems may show a file late
        raise UserError(f"--resume: one rank finds step {-first}, another step {last}; is --output the same for all?")
    if found is None:
        return None
    path, state = found
    parts = {"config": dict, "dataset": str, "training": dict, "geometry": dict}
    if missing := [name for name, kind in parts.items() if not isinstance(state.get(name), kind)]:
        raise UserError(f"--resume {path}: no checkpoint of a run: it has no {missing[0]}")
    on_main(lambda: _refuse_another_run(run, path, state))
    _compare_ranks(run, path, state)
    try:
        run.step.load_state_dict(state["training"])
    except (LookupError, ValueError, TypeError, AttributeError, RuntimeError) as error:
        last_line = (str(error).strip() or type(error).__name__).splitlines()[-1].strip()
        raise UserError(f"--resume {path}: does not fit this run: {last_line}") from None
    run.done, run.probes_are_due = state["step"], state.get("knn_is_due", False)
    if state["config"].get("keep_best") == config.keep_best:  # else of another accuracy
        run.best = state.get("best", 0.0)
    measures = ("knn_k", "knn_temperature", "val_data")
    if all(state["config"].get(key) == config.to_dict()[key] for key in measures):
        accuracy, epochs = state.get("best_knn", run.health.best_knn)
        run.health.best_knn = accuracy, epochs
    return path


def _describe_files(run: Run) -> None:
    """Describe the files of the training images, as the main rank has found them."""
    run.files = file_states(run.data.train)
    if run.config.verify_data:
        run.files["contents"] = content_digest(run.data.train)


def _refuse_another_run(run: Run, path: Path, state: Mapping[str, Any]) -> None:
    config, digest = run.config, run.data.train.digest
    differences = checkpoint.compare(state, config, digest, run.files)
    if not config.force_data and state.get("labelled", _labelled(run)) != _labelled(run):
        differences.append("labelled images: others than in the checkpoint; --force-data goes on with them")
    if differences:
        longer = state["config"].get("epochs", config.epochs) < config.epochs
        new_run = "; to train on, start a new run from its encoder: --init RUN --output NEW" if longer else ""
        raise UserError(f"--resume {path}: another run: {'; '.join(differences)}{new_run}")
    if checkpoint.changed_images(state, digest, run.files):
        _log.warning("other images than in the checkpoint (--force-data): this epoch may repeat or miss some")
    elif "contents" in state.get("files", {}):
        run.files.setdefault("contents", state["files"]["contents"])  # asked for when the run began


def _labelled(run: Run) -> str:
    """Return the digest of the images with labels for the MMNN, or nothing."""
    return "" if run.data.labelled is None else run.data.labelled.digest


def geometry(run: Run) -> dict[str, int]:
    """Describe how batches are laid out over the ranks."""
    config, ranks = run.config, run.world.size
    layout = {"ranks": ranks, "images a rank": config.batch_size // ranks}
    if any(isinstance(module, _BatchNorm) for module in run.step.method.modules()):
        layout["images to a BatchNorm"] = config.batch_size if config.sync_bn else config.batch_size // ranks
        layout |= run.step.method.geometry(config, ranks)
    if config.learns_targets:
        layout["labelled images"] = labelled_batch_size(config, ranks)
    return layout


def _compare_ranks(run: Run, path: Path, state: Mapping[str, Any]) -> None:
    """Refuse ranks on which a step would compute something else."""
    now = geometry(run)
    saved = state["geometry"]
    if saved == now:
        return
    both = f"{_show(saved)} in the checkpoint; {_show(now)} now"
    if {**saved, **_LAYOUT} == {**now, **_LAYOUT}:
        _log.info(f"other ranks, the same batches and steps: {both}")
    elif run.config.force_ranks:
        _log.warning(f"other ranks change the method, as asked (--force-ranks): {both}")
    else:
        remedy = "use as many ranks as before, or accept the change with --force-ranks"
        raise UserError(f"--resume {path}: other ranks would change the method: {both}; {remedy}")


def _show(layout: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {what.replace('s', '', count == 1)}" for what, count in layout.items())  # 1 rank
