"""``cocor-train``: pre-train an image encoder.

    main -> launch.run -> on every rank: train -> build (cocor.run), restore (cocor.resume), fit
                                         fit   -> train_epoch, finish_epoch, train_epoch, ...

A run's position is the number of finished steps; everything else follows from it and the configuration.
"""

if __name__ == "__main__":  # before PyTorch loads, so that mistakes and Ctrl-C do not have to wait
    import sys

    from cocor import cli

    sys.exit(cli.train())

import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NoReturn

import torch

from cocor import cli, resume, run_dir
from cocor.config import checks
from cocor.config.options import ONE_START, PRESETS, Config
from cocor.config.parse import flag
from cocor.config.resolve import read, resolve
from cocor.distributed import launch, signals
from cocor.distributed.collectives import World, gather, on_main
from cocor.distributed.env import STARTED, RankEnv
from cocor.distributed.report import report
from cocor.eval.probes.online import Measured
from cocor.log import PICTURE, RunLog, duration, set_up_logging
from cocor.metrics_file import read_run
from cocor.monitor import dry_run, plot, profile, track
from cocor.monitor.health import SkipNonFinite
from cocor.monitor.view_sheet import save_view_sheet
from cocor.run import Run, build
from cocor.step.compile import executable
from cocor.step.step import Metrics
from loaders.batch import Batch
from loaders.errors import UserError
from loaders.text import counted, printable

_SHOWN = 12  # names of skipped files in the log
_log = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the console command; returns the exit code (2 for a user's mistake)."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    return cli.command("cocor-train", lambda: _run(arguments))


def _run(arguments: list[str]) -> None:
    with signals.handled(report):
        given, keys = read(arguments)
        env = RankEnv.read()
        if env.first:
            for line in checks.warnings(given, keys, env.launcher in ("torchrun", "srun")):
                print(f"cocor-train: warning: {line}", file=sys.stderr)
        _start(given, arguments)


def _start(given: Config, arguments: Sequence[str]) -> None:
    """Train by ``given``, which the flags ``arguments`` describe to further ranks."""
    if RankEnv.read().launcher is None and given.trains:
        run_dir.check(given)
        track.check(given.track or ())
    if RankEnv.read().launcher is None and given.profile:
        run_dir.check_trace(given)
    launch.run(given, arguments, lambda config, world: train(config, world, given), "cocor.train")


def pretrain(config: Config) -> Path:
    """Train as ``cocor-train`` does, and return the folder of the run.

    ``config`` is best made by :func:`cocor.configure`. Several GPUs get a process each, which knows only the methods
    and pools of this package: with your own, start your program by torchrun.

    Raises:
        UserError: a mistake in ``config``, or unusable data.
        Stopped: a signal has ended the run, with a checkpoint.
    """
    checks.check(config)
    with TemporaryDirectory() as folder, signals.handled(report):
        file = Path(folder) / "config.yaml"
        config.save(file)
        once = [f"{flag(key)}={getattr(config, key)}" for key in sorted(ONE_START) if getattr(config, key)]
        _start(config, ["--config", str(file), *once])
    return config.output


def train(config: Config, world: World, given: Config) -> None:
    """Train on this rank by ``config``, that is ``given`` settled for this machine."""
    set_up_logging(world)
    config = resuming_after_restart(config)
    with ExitStack() as stack:
        lock = run_dir.lock_of(config.output)
        stack.callback(lock.release)
        if config.trains:
            on_main(lambda: run_dir.claim(config, lock))
            on_main(lambda: track.check(config.track or ()))
        elif config.profile:
            on_main(lambda: run_dir.check_trace(config))
        run = stack.enter_context(closing(build(config, world)))
        if not config.trains:
            (dry_run if config.dry_run else profile).report(run)
            return
        checkpoint_read = resume.restore(run)  # before anything is written
        roots = [data.root for data in (run.data.train, run.data.held_out) if data is not None]
        resumes = checkpoint_read is not None
        on_main(lambda: run_dir.prepare(config, given, roots, lock, resumes=resumes))
        set_up_logging(world, config.output / run_dir.LOG)
        describe(run, checkpoint_read)
        trackers = (config.track or ()) if world.main else ()
        tracking = track.Tracking(trackers, track.Tracked(config.output, config.to_dict(), run.done))
        stack.callback(lambda: tracking.close(run.done == run.total))
        log = RunLog(
            config.output, world, batch_size=config.batch_size, total_steps=run.total, log_every=config.log_every,
            start_step=run.done, again=("knn", "probe") if run.probes_are_due else (), listener=tracking,
        )  # fmt: skip
        fit(run, stack.enter_context(closing(log)))


def resuming_after_restart(config: Config) -> Config:
    """Make ``config`` resume if a launcher has restarted this rank."""
    file = config.output / run_dir.CONFIG
    if not RankEnv.read().restarts or not file.is_file():
        return config
    if config.overwrite and file.stat().st_mtime < float(os.environ.get(STARTED, "0")):
        return config  # the first start failed before it overwrote what is there
    elsewhere = config.resume not in (None, "auto")
    if elsewhere and not run_dir.checkpoints(config.output / run_dir.CHECKPOINTS):
        return replace(config, overwrite=True)  # the first start failed before it saved a checkpoint of its own
    return replace(config, resume="auto", overwrite=False)


def objective(config: Config) -> str:
    """Name what is minimised: ``moco + CoCor (preset tuned: ...)``."""
    method = config.method if config.auxiliary == "none" else f"{config.method} + {config.auxiliary}"
    if config.consistency == "none":
        return method
    names = dict.fromkeys([config.preset, *PRESETS])  # a method's two presets may be equal
    presets = {name: resolve({"method": config.method, "preset": name}) for name in names}
    keys = ("consistency", "consistency_weight", "consistency_beta", "consistency_sign")
    same = (name for name, other in presets.items() if all(getattr(other, k) == getattr(config, k) for k in keys))
    targets = "no targets" if config.mmnn == "none" else f"{config.mmnn} targets"
    name = config.consistency + (" of the printed sign" if config.consistency_sign == "printed" else "")
    loss = f"{name}, weight {config.consistency_weight:g}, beta {config.consistency_beta:g}, {targets}"
    return f"{method} + CoCor (preset {next(same, 'of its own')}: {loss})"


def describe(run: Run, checkpoint_read: Path | None) -> None:
    """Log what is about to be trained, and on what."""
    config, data = run.config, run.data
    if checkpoint_read is not None:
        _log.info(f"going on from {checkpoint_read}: {run.done:,} of {counted(run.total, 'step')} done")
    elif config.resume is not None:
        _log.info(f"no checkpoint in {config.output} yet: starting anew")
    place = f"{run.world.size} x {run.world.device.type}, {config.precision}, {run.execution}"
    share = counted(config.batch_size // run.world.size, "image")
    _log.info(objective(config))
    _log.info(f"{config.backbone}, {place}, {share} a step and rank")
    labels = "" if data.labelled is None else f", {len(data.labelled):,} of them with labels for the MMNN"
    classes = f"in {counted(len(data.train.classes), 'class')}" if data.train.classes else "without labels"
    _log.info(f"{counted(len(data.train), 'image')} {classes}{labels}")
    for images in (data.train, data.held_out):
        skipped = () if images is None else images.skipped
        for name, reason in skipped[:_SHOWN]:
            _log.warning(f"skipped {printable(name)}: {reason}")
        if len(skipped) > _SHOWN:
            _log.warning(f"skipped {len(skipped) - _SHOWN:,} more such files")
    remark = run.step.method.remark(config, len(data.train))
    if run.world.main and remark:
        _log.warning(remark)
    if run.world.main and run.probes is None and (config.knn_every or config.probe_every):
        _log.info("no held-out images with labels: neither k-NN nor a probe is measured (see --val-data)")


def fit(run: Run, log: RunLog) -> None:
    """Train from ``run.done`` to the end.

    Raises Stopped, with a checkpoint written, if a signal asks for it.
    """
    started = time.monotonic()
    make_step = executable(run.step, run.execution)
    if run.config.on_nan == "skip":
        make_step = SkipNonFinite(run.step, make_step)
    if run.probes_are_due:
        measure(run, log)
        if run.done == run.total:
            resume.save(run, must=True)
    if run.done < run.total:
        while run.done < run.total:
            train_epoch(run, make_step, log)
            finish_epoch(run, log)
        if run.world.main and run.config.plot:
            draw_curves(run, log)
    _log.info(f"done in {duration(time.monotonic() - started)}: {run.config.output}")


def draw_curves(run: Run, log: RunLog) -> None:
    """Draw plot.png, as ``cocor-plot`` does, if matplotlib is installed."""
    output = run.config.output
    with suppress(UserError):
        plot.draw({output.resolve().name: read_run(output)}, output / run_dir.PLOT)
        log.event(PICTURE, run.done, run.config.epochs, {"file": run_dir.PLOT})


def train_epoch(run: Run, make_step: Callable[[Batch, Batch | None, int], Metrics], log: RunLog) -> None:
    """Train the rest of an epoch, with checkpoints when they are due."""
    config = run.config
    epoch, first = divmod(run.done, run.loader.steps_per_epoch)
    sheet = config.output / run_dir.VIEWS
    with closing(run.pairs(epoch, first)) as batches:
        for batch, labelled in log.timed(batches):
            if run.world.main and not sheet.exists():
                save_view_sheet(batch, sheet, config.mean, config.std)
                log.event(PICTURE, run.done, epoch, {"file": run_dir.VIEWS})
            # Dropout and the like: checkpoints need no generator state, and it does not matter who else draws from it.
            torch.manual_seed((config.seed * 1_000_003 + run.done * 4096 + run.world.rank) % 2**63)
            metrics = make_step(batch, labelled, run.done)
            run.done += 1
            signals.defer()  # from now on there is something to save
            run.probes_are_due = False
            run.health(run.done, metrics, batch, labelled, run.step.learning_rate)
            log.step(run.done, epoch, run.step.learning_rate, metrics)
            if config.log_samples:
                log.event("samples", run.done, epoch, {"index": gather(batch.index)})
            if run.done % run.loader.steps_per_epoch == 0:
                continue  # the epoch's batches end here, and finish_epoch does what is due now
            seconds = 60 * config.checkpoint_every_minutes
            due = run.world.main and seconds > 0 and time.monotonic() - run.saved >= seconds
            signum, due_anywhere = run.any_rank(signals.requested(), due)
            if signum:
                save_and_stop(run, signum)
            if due_anywhere:
                resume.save(run, must=False)
                run.any_rank.forget()  # what is under way dates from before this checkpoint, and would ask for another


def finish_epoch(run: Run, log: RunLog) -> None:
    """Measure and save a checkpoint, if that is due, after an epoch's last step."""
    config, last = run.config, run.done == run.total
    run.health.check(run.step.learning_rate)  # before k-NN, which could only report that features are not finite
    run.probes_are_due = due(run, config.knn_every) or due(run, config.probe_every)
    stop_if_requested(run)
    if run.probes_are_due:
        # Before saving: a run that stops in between and resumes neither repeats nor misses a measurement.
        measure(run, log)
        if run.probes_are_due or not last:
            stop_if_requested(run)
    if due(run, config.checkpoint_every_epochs) or due(run, config.keep_every_epochs):
        resume.save(run, must=last)


def stop_if_requested(run: Run) -> None:
    """Save and stop if a signal has reached any rank. Collective."""
    (signum,) = run.any_rank.now(signals.requested())
    if signum:
        save_and_stop(run, signum)


def save_and_stop(run: Run, signum: int) -> NoReturn:
    """Write a checkpoint of the step just finished, and stop."""
    if run.world.main:
        _log.info(f"{signal.Signals(signum).name}: writing a checkpoint after step {run.done:,} of {run.total:,}")
    resume.save(run, must=True)
    raise signals.Stopped(signum, f"after step {run.done:,} of {run.total:,}")


def due(run: Run, every: int) -> bool:
    """Tell whether what happens after so many epochs happens at this step; not with 0."""
    epochs, within = divmod(run.done, run.loader.steps_per_epoch)
    return bool(every) and (run.done == run.total or (not within and epochs % every == 0))


def measure(run: Run, log: RunLog) -> None:
    """Measure k-NN and linear probe on the main rank, until a signal. Collective."""
    config, finished = run.config, True
    kinds = [kind for kind, every in (("knn", config.knn_every), ("probe", config.probe_every)) if due(run, every)]
    if run.probes is not None and kinds:
        with torch.compiler.set_stance("force_eager"):  # for its odd batch sizes
            found = run.probes(run.step.method.backbone, kinds, interrupted=signals.requested)
        finished = found is not None
        if found is not None:
            record(run, log, found)
    (run.probes_are_due,) = map(bool, run.any_rank.now(not finished))


def record(run: Run, log: RunLog, found: Measured) -> None:
    """Log what was measured, and keep the best checkpoint."""
    epoch = run.done // run.loader.steps_per_epoch
    for kind, values in found.values.items():
        log.event(kind, run.done, epoch, values)
        name, note = ("k-NN", f" ({found.note})" if found.note else "") if kind == "knn" else ("linear-probe", "")
        _log.info(f"{name} accuracy after {counted(epoch, 'epoch')}: {values['accuracy']:.1%}{note}")
        if kind == run.config.keep_best and run.done and values["accuracy"] > run.best:
            run.best = values["accuracy"]
            resume.save_best(run)
    if "knn" in found.values:
        knn = found.values["knn"]
        run.health.check_knn(knn["accuracy"], int(knn["queries"]), epoch)
