"""Stopping while the loader hangs, as on a disk that does not answer: save what is finished, without more data.

A signal has asked to stop (:mod:`cocor.distributed.signals`), and the training thread is waiting for its next batch.
Nothing of the
run changes meanwhile, so another thread writes the checkpoint, on the main rank and without collectives, and ends the
process. If the main rank has its data and is waiting in the middle of a step for a rank that has none, that step cannot
be undone, and the run resumes from the last checkpoint.
"""

import logging
import signal
import threading
import time
from typing import NoReturn

from cocor import leaving, resume
from cocor.distributed import signals
from cocor.run import Run
from loaders.errors import UserError

_OTHERS_WAIT = 7.0  # seconds for the main rank to save: when a rank exits, its launcher ends the others
_SAVING = 60.0  # seconds after which the disk of the run folder is taken to hang as well
_log = logging.getLogger(__name__)


def leave(run: Run, signum: int) -> NoReturn:
    """End this process, as signal ``signum`` has asked; the main rank first saves the last finished step if it can."""
    position = f"after step {run.done:,} of {run.total:,}: no data for {signals.PATIENCE:.0f} s"
    _log.warning(f"{signal.Signals(signum).name} {position}")
    saved = threading.Event()
    leaving.alone()
    if run.world.main:
        saving = threading.Thread(target=_save, args=(run, saved), daemon=True)
        saving.start()
        saving.join(_SAVING)
    else:
        time.sleep(_OTHERS_WAIT)
    signals.leave(signals.Stopped(signum, position, "there" if saved.is_set() else "the last checkpoint"))


def _save(run: Run, saved: threading.Event) -> None:
    try:
        resume.save_alone(run)
        saved.set()
    except UserError as error:
        _log.error(str(error))
