"""The cache in which torch.compile keeps its work from one run to the next, and its limit.

    $XDG_CACHE_HOME/cocor/compiled (else ~/.cache/...)
        torch-2.14.1-NVIDIA-H100-resnet50-224px-256/    what runs of this kind have compiled, several at a time; the
                                                        last number is images per rank
            used                                        each of them holds a shared lock on it; its modification time
                                                        is when the last of them began
        .removed/                                       folders that are being deleted

When a run begins to compile, folders that exceed ``LIMIT`` bytes in total are deleted, least recently used first, but
none that is in use or was within a day. Folders are deleted as a whole: PyTorch's files refer to one another, in ways
that change with its version, and a folder without some of them is not known to work. This takes about a second at most;
the rest is left to the next run. If the user has chosen a folder (``TORCHINDUCTOR_CACHE_DIR``), that one is used and
nothing is deleted.
"""

import fcntl
import logging
import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import torch

from cocor.config.options import Config
from cocor.distributed.collectives import ranks
from loaders.files import user_cache
from loaders.text import printable

VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
LIMIT = 5 << 30  # bytes
_STAYS = 24 * 3600.0  # seconds after the last use
_LOOKING, _REMOVING = 0.5, 0.5  # seconds at most, to add up sizes and to delete
_MARK, _REMOVED = "used", ".removed"
_log = logging.getLogger(__name__)
_held: list[int] = []  # file descriptors, for as long as this process lives


def keep(config: Config) -> None:
    """Let torch.compile cache its work for ``config`` beside our other caches, not in /tmp, which machines empty and do
    not share."""
    if not _is_default(os.environ.get(VARIABLE)):
        return
    folder = user_cache() / "compiled"
    place = folder / _name(config)
    try:
        _use(place)
    except OSError:  # then PyTorch's default folder has to do
        return
    os.environ[VARIABLE] = str(place)
    try:
        prune(folder)
    except OSError as fault:
        _log.warning(f"old compiled code in {printable(folder)} cannot be removed ({fault.strerror})")


def prune(folder: Path) -> None:
    """Delete what exceeds ``LIMIT`` in ``folder``, see the module. Logs one line if anything is deleted."""
    removed = folder / _REMOVED
    excess = _excess(folder, time.monotonic() + _LOOKING)
    if excess is None:
        _log.warning(f"{printable(folder)} holds too many files to see how large it is; empty it if space is short")
        return
    gone = [place.name for place in excess if _move(place, removed)]
    if gone:
        _log.info(f"compiled code in {printable(folder)} exceeds {LIMIT / 1e9:.1f} GB: removed {', '.join(gone)}")
    deadline = time.monotonic() + _REMOVING
    with suppress(FileNotFoundError):  # another run does the same
        for place in removed.iterdir():
            shutil.rmtree(place)
            if time.monotonic() > deadline:
                return
        removed.rmdir()


def _excess(folder: Path, deadline: float) -> list[Path] | None:
    """The folders to delete, or None if their sizes cannot be added up before ``deadline``."""
    used = {place: _last_used(place) for place in folder.iterdir() if place.is_dir() and place.name != _REMOVED}
    total, found = 0, []
    for place in sorted(used, key=lambda place: used[place], reverse=True):
        for size in _sizes(place):
            total += size
            if total > LIMIT:  # so is all that is older, whatever its size
                break
            if time.monotonic() > deadline:
                return None
        if total > LIMIT and time.time() - used[place] > _STAYS:
            found.append(place)
    return found


def _sizes(folder: Path) -> Iterator[int]:
    """The bytes on disk of every file below ``folder``."""
    with suppress(FileNotFoundError), os.scandir(folder) as entries:  # compilers rename and remove files
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield from _sizes(Path(entry.path))
            else:
                yield entry.stat(follow_symlinks=False).st_blocks * 512


def _last_used(place: Path) -> float:
    for path in (place / _MARK, place):
        with suppress(OSError):
            return path.stat().st_mtime
    return time.time()


def _use(place: Path) -> None:
    """Lock ``place`` as in use until this process ends; makes it if need be. OSError if it cannot be written to."""
    while True:
        place.mkdir(parents=True, exist_ok=True)
        if not os.access(place, os.W_OK):
            raise PermissionError(f"{place} cannot be written to")
        handle = os.open(place / _MARK, os.O_RDWR | os.O_CREAT, 0o666)
        with suppress(OSError):  # a file system without locks, from which nothing is removed either
            fcntl.flock(handle, fcntl.LOCK_SH)
        if _is_at(handle, place):
            os.utime(handle)
            _held.append(handle)
            return
        os.close(handle)


def _move(place: Path, removed: Path) -> bool:
    """Move ``place`` into the folder ``removed``, unless it is in use; returns whether it was moved."""
    with suppress(BlockingIOError, FileNotFoundError), (place / _MARK).open("a") as mark:
        fcntl.flock(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _is_at(mark.fileno(), place):
            removed.mkdir(exist_ok=True)
            place.rename(removed / f"{place.name}-{os.getpid()}-{time.time_ns()}")
            return True
    return False


def _is_at(mark: int, place: Path) -> bool:
    """Whether this open file is the mark of the folder that is at ``place`` now: another process may have moved the
    folder that it was in."""
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(mark), (place / _MARK).stat())
    return False


def _name(config: Config) -> str:
    """A folder name that runs with the same compiled programs have in common, on any number of ranks. Runs that differ
    in other respects may share a folder as well."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    images = config.batch_size // ranks()
    name = f"torch-{torch.__version__}-{device}-{config.backbone}-{config.image_size}px-{images}"
    return re.sub(r"[^\w.+-]+", "-", name)


def _is_default(folder: str | None) -> bool:
    """Whether ``folder`` is not the user's choice: PyTorch sets the variable to its own default while it loads."""
    if folder is None:
        return True
    with suppress(ImportError, KeyError, OSError):  # elsewhere in other versions; a user without a name
        from torch._inductor.runtime.cache_dir_utils import default_cache_dir

        return folder == default_cache_dir()
    return False
