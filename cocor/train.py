"""``cocor-train``: pre-train an image encoder.

    main -> launch.run -> on every rank: train -> build -> [restore] -> fit

``fit`` is the loop: take a batch and a labelled batch, make a step, now and then log, measure k-NN, save. A run's
position is the number of finished steps; everything else follows from it and the configuration.
"""

import logging
import sys
import time
from collections.abc import Generator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from cocor import checkpoint, launch, run_folder
from cocor.build import build_method, build_target
from cocor.config import Config, load
from cocor.data import Data, knn_loaders, labelled_loader, open_data, training_loader
from cocor.distributed import World, any_rank, barrier
from cocor.dry_run import report
from cocor.export import export_backbone
from cocor.log import RunLog, duration, set_up_logging
from cocor.online_knn import OnlineKnn
from cocor.step import TrainingStep
from cocor.view_sheet import save_view_sheet
from loaders.batch import Batch, Loader
from loaders.errors import UserError

_log = logging.getLogger("cocor.train")  # also where this module is __main__, as on launched ranks


def main(argv: Sequence[str] | None = None) -> int:
    """The console command; returns the exit code (2 for a user's mistake)."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    return launch.command("cocor-train", lambda: launch.run(load(arguments), arguments, train, "cocor.train"))


@dataclass
class Run:
    """All parts of a training run on one rank."""

    config: Config
    world: World
    data: Data
    step: TrainingStep
    loader: Loader
    labelled: Loader | None
    knn: OnlineKnn | None
    done: int = 0  # finished steps

    @property
    def total(self) -> int:
        return self.config.epochs * self.loader.steps_per_epoch

    def close(self) -> None:
        for part in (self.loader, self.labelled, self.knn):
            if part is not None:
                part.close()


def train(config: Config, world: World) -> None:
    """Train on this rank as ``config`` says. UserError for whatever the user can mend."""
    set_up_logging(world)
    with ExitStack() as stack:
        run = stack.enter_context(closing(build(config, world)))
        if config.dry_run:
            report(run)
            return
        checkpoint_read = restore(run)  # before anything is written
        if world.main:
            run_folder.prepare(config, run.data.train.root)
        barrier()
        set_up_logging(world, config.output / "log.txt")
        describe(run, checkpoint_read)
        log = RunLog(
            config.output,
            world,
            batch_size=config.batch_size,
            total_steps=run.total,
            log_every=config.log_every,
            start_step=run.done,
        )
        fit(run, stack.enter_context(closing(log)))


def build(config: Config, world: World) -> Run:
    """Open the data and build networks and loaders. Ranks read the folder one after the other's index is cached."""
    if not world.main:
        barrier()
    data = open_data(config)
    if world.main:
        barrier()
    precision = torch.bfloat16 if config.precision == "bf16" else torch.float32
    if world.device.type == "cuda":
        torch.backends.cudnn.benchmark = True
        torch.set_float32_matmul_precision("high")
    method = build_method(config, world)
    loader = training_loader(config, data, world, precision)
    labelled = labelled_loader(config, data, world, precision, loader.steps_per_epoch)
    step = TrainingStep(
        config,
        method,
        build_target(config, world),
        len(data.train.classes) if labelled is not None else None,
        steps_per_epoch=loader.steps_per_epoch,
        precision=precision,
    )
    evaluation = knn_loaders(config, data, world, precision) if world.main else None
    knn = OnlineKnn(config, *evaluation, precision) if evaluation is not None else None
    return Run(config, world, data, step, loader, labelled, knn)


def describe(run: Run, checkpoint_read: Path | None) -> None:
    """Say what is about to happen."""
    config, data = run.config, run.data
    if checkpoint_read is not None:
        _log.info(f"going on from {checkpoint_read}: {run.done:,} of {run.total:,} steps done")
    elif config.resume is not None:
        _log.info(f"no checkpoint in {config.output} yet: starting anew")
    kind = config.method if config.consistency == "none" else f"{config.method} + CoCor ({config.mmnn} targets)"
    place = f"{run.world.size} x {run.world.device.type}, {config.precision}"
    _log.info(f"{kind}, {config.backbone}, {place}, {config.batch_size // run.world.size} images a step and rank")
    labels = "" if data.labelled is None else f", {len(data.labelled):,} of them with labels for the MMNN"
    classes = f"in {len(data.train.classes):,} classes" if data.train.classes else "without labels"
    _log.info(f"{len(data.train):,} images {classes}{labels}")
    for name, reason in data.train.skipped:
        _log.warning(f"skipped {name}: {reason}")
    if run.world.main and run.knn is None and config.knn_every:
        _log.info("no held-out images with labels: k-NN is not measured (see --val-data)")


def restore(run: Run) -> Path | None:
    """Go on from the checkpoint that ``--resume`` means, if it means one; returns its path."""
    found = None if run.config.resume is None else checkpoint.find(run.config.resume, run.config.output)
    if found is None:
        return None
    path, state = found
    differences = checkpoint.compare(state, run.config, run.data.train.digest)
    if differences:
        raise UserError(f"--resume {path}: another run: {'; '.join(differences)}")
    run.step.load_state_dict(state["training"])
    run.done = state["step"]
    return path


def fit(run: Run, log: RunLog) -> None:
    """Train from ``run.done`` to the end; leave checkpoints, k-NN measurements and the exported backbone."""
    config, per_epoch = run.config, run.loader.steps_per_epoch
    started = saved = time.monotonic()
    sheet = config.output / "views.png"
    if run.done == 0:
        measure_knn(run, log)
    while run.done < run.total:
        epoch, first = divmod(run.done, per_epoch)
        with closing(pairs(run, epoch, first)) as batches:
            for batch, labelled in log.timed(batches):
                if run.world.main and not sheet.exists():
                    save_view_sheet(batch, sheet)
                metrics = run.step(batch, labelled, run.done)
                run.done += 1
                log.step(run.done, epoch, run.step.learning_rate, metrics)
                if run.done % config.log_every == 0 or run.done % per_epoch == 0:
                    refuse_divergence(run, metrics["loss"])
                if run.done % per_epoch and save_is_due(run, saved):
                    save(run)
                    saved = time.monotonic()
        last = run.done == run.total
        # Measured before saving: a run that stops in between and resumes neither doubles nor misses a measurement.
        if last or (config.knn_every and (epoch + 1) % config.knn_every == 0):
            measure_knn(run, log)
        if last or (epoch + 1) % config.checkpoint_every_epochs == 0:
            save(run)
            saved = time.monotonic()
    _log.info(f"done in {duration(time.monotonic() - started)}: {config.output}")


def pairs(run: Run, epoch: int, first: int) -> Generator[tuple[Batch, Batch | None], None, None]:
    """Batches of an epoch from step ``first`` on, each with its labelled batch, if there is one."""
    with ExitStack() as stack:
        batches = stack.enter_context(closing(run.loader.epoch(epoch, first)))
        if run.labelled is None:
            for batch in batches:
                yield batch, None
        else:
            labelled = stack.enter_context(closing(run.labelled.epoch(epoch, first)))
            yield from zip(batches, labelled, strict=True)


def refuse_divergence(run: Run, loss: Tensor) -> None:
    """Stop before weights that are no numbers replace good ones in the checkpoints."""
    if any_rank(not bool(loss.isfinite()), run.world.device):
        raise UserError(f"the loss is not finite at step {run.done}: lower --lr, or try --precision fp32")


def save_is_due(run: Run, saved: float) -> bool:
    """Whether ``--checkpoint-every-minutes`` are over, by the main rank's clock, asked every few steps."""
    minutes = run.config.checkpoint_every_minutes
    if not minutes or run.done % run.config.log_every:
        return False
    return any_rank(run.world.main and time.monotonic() - saved >= 60 * minutes, run.world.device)


def save(run: Run) -> None:
    """Write a checkpoint and the backbone, on the main rank; the others wait."""
    if run.world.main:
        config = run.config
        state = {
            "step": run.done,
            "epoch": run.done // run.loader.steps_per_epoch,
            "training": run.step.state_dict(),
            **checkpoint.describe(config, run.data.train.digest),
        }
        checkpoint.save(config.output / checkpoint.FOLDER, state, keep=config.keep_checkpoints)
        about = {"architecture": config.backbone, "stem": config.stem, "image_size": config.image_size}
        about |= {"method": config.method, "step": run.done}
        export_backbone(run.step.method.backbone, config.output / "backbone.safetensors", about)
    barrier()


def measure_knn(run: Run, log: RunLog) -> None:
    """k-NN accuracy of the present backbone, on the main rank; the others wait."""
    if run.knn is not None:
        result = run.knn(run.step.method.backbone)
        epoch = run.done // run.loader.steps_per_epoch
        values = {"accuracy": result.accuracy, "k": result.k, "queries": result.queries, "bank": result.bank}
        log.event("knn", run.done, epoch, values)
        note = f" ({result.note})" if result.note else ""
        _log.info(f"k-NN accuracy after {epoch} epochs: {result.accuracy:.1%}{note}")
    barrier()


if __name__ == "__main__":
    sys.exit(main())
