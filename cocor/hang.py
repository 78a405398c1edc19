"""Leaving where data do not come, as from a disk that does not answer: what is finished is saved without waiting on.

A signal has asked to stop (:mod:`cocor.stop`), and the thread that trains waits for its next batch. Nothing of the run
changes meanwhile, so another thread writes the checkpoint, on the main rank and without asking the others, and ends
the process. Where the main rank itself has its data, and waits in the middle of a step for a rank that has none, the
step cannot be undone, and the last checkpoint counts.
"""

import logging
import signal
import threading
import time
from typing import NoReturn

from cocor import leaving, resume, stop
from cocor.run import Run
from loaders.errors import UserError
from loaders.names import printable

_OTHERS_WAIT = 7.0  # seconds, for the main rank to save: when one rank has left, its launcher ends the others
_SAVING = 60.0  # seconds after which the disk with the run does not answer either
_SHOWN = 3  # files
_log = logging.getLogger(__name__)


def leave(run: Run, signum: int) -> NoReturn:
    """End this process as ``signum`` asked for, with a checkpoint of the last finished step if it can be written."""
    position = f"after step {run.done:,} of {run.total:,}: no data for {stop.PATIENCE:.0f} s{_awaited(run)}"
    _log.warning(f"{signal.Signals(signum).name} {position}")
    saved = threading.Event()
    leaving.alone()
    if run.world.main:
        saving = threading.Thread(target=_save, args=(run, saved), daemon=True)
        saving.start()
        saving.join(_SAVING)
    else:
        time.sleep(_OTHERS_WAIT)
    stop.leave(stop.Stopped(signum, position, "there" if saved.is_set() else "the last checkpoint"))


def _save(run: Run, saved: threading.Event) -> None:
    try:
        resume.save_alone(run)
        saved.set()
    except UserError as error:
        _log.error(str(error))


def _awaited(run: Run) -> str:
    names = run.reading()
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f", while reading {', '.join(map(printable, names[:_SHOWN]))}{more}" if names else ""
