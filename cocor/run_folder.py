"""The folder of a run: made by one rank, never mixed up with another run's, never emptied by accident.

runs/NAME/  config.yaml  log.txt  metrics.jsonl  checkpoints/  backbone.safetensors  views.png  (faults.jsonl)
"""

import shlex
import shutil
import sys
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from cocor import atomic, checkpoint
from cocor.config import Config
from cocor.run_lock import RunLock
from loaders.errors import UserError
from loaders.names import printable

CONFIG = "config.yaml"
_MARK = "# cocor "  # begins the line of versions in a run's config.yaml
_OF_A_RUN = frozenset(
    {CONFIG, "log.txt", "metrics.jsonl", checkpoint.FOLDER, "backbone.safetensors", "views.png", "faults.jsonl"}
)


def prepare(config: Config, images: Sequence[Path], lock: RunLock) -> None:
    """Make the output folder of a new run, or accept that of a run to resume; save the configuration in it. ``lock``
    is held afterwards.

    UserError if something else is there: a run is only replaced with ``--overwrite``, nothing that is no run ever is,
    and the folders of ``images`` and the run stay apart.
    """
    folder = config.output
    for place in images:
        _refuse_overlap(folder, place)
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--output {folder} is a file; choose another --output")
    if folder.exists() and any(folder.iterdir()):
        _accept(config, is_run=_is_run(folder) or not any(map(_kept, folder.iterdir())))
    try:
        (folder / checkpoint.FOLDER).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--output {folder}: cannot be made: {error.strerror}; choose another --output") from None
    lock.take(make=True)
    for leftover in folder.glob(f".*{atomic.TEMPORARY}"):  # of killed runs
        leftover.unlink(missing_ok=True)
    _save_config(config)


def _is_run(folder: Path) -> bool:
    """Whether the folder's config.yaml was written by a run; other programs have files of that name as well."""
    try:
        with (folder / CONFIG).open(encoding="utf-8", errors="replace") as file:
            return any(line.startswith(_MARK) for line in islice(file, 4))
    except OSError:
        return False


def _kept(entry: Path) -> bool:
    """Whether ``entry`` of an output folder is more than what a run leaves that is killed while it begins."""
    if entry.name == checkpoint.FOLDER and entry.is_dir():
        return any(entry.iterdir())
    begun = entry.name == "log.txt" and entry.stat().st_size == 0
    return not begun and not (entry.name.startswith(".") and entry.name.endswith(atomic.TEMPORARY))


def _accept(config: Config, is_run: bool) -> None:
    """Settle what becomes of an output folder that is not empty: kept to resume in, or emptied."""
    folder = config.output
    if not is_run and (config.overwrite or config.resume is not None):
        raise UserError(f"--output {folder} holds something, but no run; choose another --output")
    if config.overwrite:
        _empty(folder)
    elif config.resume is not None:
        own = config.resume == "auto" or Path(config.resume).expanduser().resolve().is_relative_to(folder.resolve())
        if not own:
            raise UserError(f"--output {folder} holds another run than --resume; choose another --output")
    else:
        raise UserError(f"--output {folder} is in use; pass --resume, --overwrite, or another --output")


def _refuse_overlap(folder: Path, images: Path) -> None:
    output, place = folder.resolve(), images.resolve()
    if output.is_relative_to(place) or place.is_relative_to(output):
        raise UserError(f"--output {folder} and the images in {images} overlap; choose another --output")


def _empty(folder: Path) -> None:
    """Remove a run. UserError, with nothing removed, if the folder holds anything that no run writes."""
    strange = [entry.name for entry in folder.iterdir() if entry.name not in _OF_A_RUN and entry.name[0] != "."]
    if strange:
        raise UserError(f"--output {folder} holds {printable(strange[0])}, which is of no run; choose another --output")
    try:
        for entry in folder.iterdir():
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()
    except OSError as error:
        raise UserError(f"--output {folder}: cannot be emptied: {error.strerror}; choose another --output") from None


def _save_config(config: Config) -> None:
    """Write the resolved configuration, with the command and the versions that produced the run."""
    versions = ", ".join(f"{name} {version}" for name, version in checkpoint.versions().items())
    command = shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])
    config.save(config.output / CONFIG, f"{printable(command)}\n{versions}")
