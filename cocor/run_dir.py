"""Guard the folder of a run: never shared by two runs, never emptied by accident.

runs/NAME/  config.yaml  log.txt  metrics.jsonl  checkpoints/  backbone.safetensors  views.png  plot.png  .lock
            (faults.jsonl  tracking/)
"""

import logging
import os
import platform
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib import metadata
from itertools import islice
from pathlib import Path

from filelock import FileLock, Timeout

import cocor
from cocor.config.options import Config
from loaders.datasets.layout import training_splits
from loaders.errors import UserError, explain
from loaders.files import TEMPORARY, check_file, check_folder
from loaders.prep.demo import is_demo
from loaders.text import counted, printable

CONFIG = "config.yaml"
CHECKPOINTS = "checkpoints"
LOG = "log.txt"
METRICS = "metrics.jsonl"
TRACKING = "tracking"
VIEWS, PLOT = "views.png", "plot.png"
_LOCK = ".lock"
_PATIENCE = 30.0  # seconds to wait for the lock: schedulers restart a command while the old process is still dying
_PACKAGES = ("torch", "torchvision", "timm", "numpy")  # on whose versions a result may depend
_MARK = "# cocor "  # how the line of versions begins in a run's config.yaml
_OF_A_RUN = frozenset(
    {CONFIG, LOG, METRICS, CHECKPOINTS, TRACKING, VIEWS, PLOT, "backbone.safetensors", "faults.jsonl"}
)
_log = logging.getLogger(__name__)


def check(config: Config) -> None:
    """Raise a UserError if the run must not write to its output folder.

    A run is replaced only with ``--overwrite``, and a folder that holds anything else never is. The run folder must not
    lie in a folder of images or the other way round, and ``--overwrite`` must not remove files that the run reads.
    """
    folder = config.output
    for place in () if config.loader == "synthetic" else (config.data, config.val_data):
        if place is not None and not is_demo(place) and training_splits(place) is None:
            refuse_overlap(folder, place)
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--output {folder} is a file; choose another --output")
    check_folder("--output", folder)
    if config.overwrite:
        for key in ("init", "labels", "label_split"):
            file = getattr(config, key)
            if file is not None and file.resolve().is_relative_to(folder.resolve()):
                flag = f"--{key.replace('_', '-')}"
                raise UserError(f"{flag} {file} is in --output {folder}, which --overwrite empties; choose another")
    if folder.exists() and any(map(_is_content, folder.iterdir())):
        _accept(config, _is_run(folder))


def trace(config: Config) -> Path:
    """Return the file of ``--profile``, beside the run's folder."""
    output = config.output if config.output.name else config.output.resolve()  # "." has no name
    return output.with_name(output.name + "-trace.json.gz")


def check_trace(config: Config) -> None:
    """Raise a UserError if the file of ``--profile`` cannot be written."""
    check_file("--output", trace(config))


def lock_of(folder: Path) -> FileLock:
    """Return the lock on a run's ``folder``, which its main rank is to hold."""
    return FileLock(folder / _LOCK)


def claim(config: Config, lock: FileLock) -> None:
    """Check the output folder; hold ``lock`` if there is a run in it."""
    check(config)
    if Path(lock.lock_file).exists():
        take(lock)


def take(lock: FileLock) -> None:
    """Wait for ``lock`` and hold it; UserError if another process has it after half a minute."""
    if lock.is_locked:
        return
    folder = Path(lock.lock_file).parent
    try:
        try:
            lock.acquire(timeout=min(1, _PATIENCE))
        except Timeout:
            _log.warning(f"waiting for another process that still uses {folder}")
            lock.acquire(timeout=_PATIENCE)
    except Timeout:
        raise UserError(f"--output {folder} is written to by another process; stop it or choose another") from None
    except (OSError, NotImplementedError):  # a file system without locks does not stop the run
        return


def prepare(config: Config, given: Config, images: Sequence[Path], lock: FileLock, *, resumes: bool) -> None:
    """Make the folder of a new run, or accept that of one that ``resumes``.

    Holds ``lock``, and saves the configuration as the user has ``given`` it. UserError as in :func:`check`, here for
    all folders of ``images``, or if another process has begun the run meanwhile.
    """
    folder = config.output
    for place in images:
        refuse_overlap(folder, place)
    check(config)
    try:
        (folder / CHECKPOINTS).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--output {folder}: cannot be made: {error.strerror}; choose another --output") from None
    take(lock)
    if config.overwrite:
        _empty(folder)
    elif not resumes and checkpoints(folder / CHECKPOINTS):  # while this one waited for the lock
        raise UserError(f"--output {folder}: another process has begun this run meanwhile; start the command again")
    for leftover in folder.glob(f".*{TEMPORARY}"):  # of killed runs
        leftover.unlink(missing_ok=True)
    _save_config(config, given)


def checkpoints(folder: Path) -> list[Path]:
    """List the files in ``folder`` with a checkpoint's name, unlike copies."""
    return [path for path in folder.glob("step_*.pt") if step_of(path) >= 0]


def step_of(checkpoint: Path) -> int:
    """Return the steps in a checkpoint's name; -1 for ``step_best.pt`` and the like."""
    digits = checkpoint.stem.removeprefix("step_")
    return int(digits) if digits.isdecimal() else -1


def _is_run(folder: Path) -> bool:
    """Tell whether a run, not another program, has written the folder's config.yaml."""
    try:
        with (folder / CONFIG).open(encoding="utf-8", errors="replace") as file:
            return any(line.startswith(_MARK) for line in islice(file, 4))
    except OSError:
        return False


def _is_content(entry: Path) -> bool:
    """Tell whether ``entry`` is more than a run killed at its start leaves behind."""
    if entry.name == CHECKPOINTS and entry.is_dir():
        return any(entry.iterdir())
    begun = entry.name == LOG and entry.stat().st_size == 0
    leftover = entry.name.startswith(".") and entry.name.endswith(TEMPORARY)
    return not (begun or leftover or entry.name == _LOCK)


def _accept(config: Config, is_run: bool) -> None:
    """Raise a UserError unless a non-empty output folder may be resumed in or emptied."""
    folder = config.output
    if not is_run and (config.overwrite or config.resume is not None):
        raise UserError(f"--output {folder} holds something, but no run; choose another --output")
    if config.overwrite:
        foreign = [entry.name for entry in folder.iterdir() if entry.name not in _OF_A_RUN and entry.name[0] != "."]
        if foreign:
            what = f"holds {printable(foreign[0])}, which is of no run"
            raise UserError(f"--output {folder} {what}; choose another --output")
    elif config.resume is not None:
        place = Path(os.path.expanduser(config.resume))  # noqa: PTH111 (a Path's own raises for unknown users)
        own = config.resume == "auto" or place.resolve().is_relative_to(folder.resolve())
        if not own:
            raise UserError(f"--output {folder} holds another run than --resume; choose another --output")
    else:
        raise UserError(f"--output {folder} holds an earlier run; pass --resume, --overwrite, or another --output")


def refuse_overlap(folder: Path, images: Path) -> None:
    """Raise a UserError if one of ``folder`` and ``images`` lies within the other."""
    output, place = folder.resolve(), images.resolve()
    if output.is_relative_to(place) or place.is_relative_to(output):
        raise UserError(f"--output {folder} and the images in {images} overlap; choose another --output")


def _empty(folder: Path) -> None:
    """Remove all of a run but its lock."""
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name == CONFIG):  # last, as it marks a run
        if entry.name == _LOCK:
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()
    (folder / CHECKPOINTS).mkdir()


def _save_config(config: Config, given: Config) -> None:
    """Write the resolved configuration, with the command and versions as comments.

    GPUs and threads of this machine are mentioned in a comment only: the file may be used on another one.
    """
    found = ", ".join(f"{name} {version}" for name, version in versions().items())
    command = shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])
    machine = f"{counted(config.gpus or 0, 'GPU')} here, {counted(config.workers, 'thread')} a loader"
    kept = replace(config, gpus=given.gpus, workers=given.workers)
    kept.save(config.output / CONFIG, f"{printable(command)}\n{found}\n{machine}")


def versions() -> dict[str, str]:
    """Return versions of cocor, Python and packages by name, importing none."""
    found = {name: _version(name) for name in _PACKAGES}
    return {"cocor": cocor.__version__, "python": platform.python_version(), **found}


def check_pair() -> None:
    """Raise a UserError if torchvision does not fit PyTorch, where timm would crash."""
    try:
        import torchvision  # noqa: F401
    except (ImportError, RuntimeError, OSError) as error:
        if explain(error):  # a full disk, say, not a library that does not fit
            raise
        torch, why = _version("torch"), " ".join(str(error).split())[:200]
        major, minor, *_ = [*torch.split("."), ""]
        fitting = f"==0.{15 + int(minor)}.*" if major == "2" and minor.isdecimal() else ""
        remedy = f"install the pair: pip install torch=={torch} torchvision{fitting}"
        mistake = f"torchvision {_version('torchvision')} does not work with torch {torch} ({why})"
        raise UserError(f"{mistake}; {remedy}") from None


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:  # not installed by pip or the like
        return "unknown"
