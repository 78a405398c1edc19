"""Where torch.compile keeps its work from one run to the next, and how much of it.

    $XDG_CACHE_HOME/cocor/compiled (else ~/.cache/...)
        torch-2.14.1-NVIDIA-H100-resnet50-224px-256/    whatever runs of this kind have compiled, several at a time;
                                                        the last number is of images a rank
            used                                        locked by each of them; its time is when the last one began
        .removed/                                       on its way out

Folders beyond ``LIMIT`` bytes go when a run begins to compile, those first that have not been used for longest; what is
used at that time, or was within a day, stays. They go as a whole: PyTorch's files refer to one another, in ways that
change with its version, and a folder that lacks some of them is not known to work. All of it takes about a second at
most; what is left over is for the next run. Where the user has chosen a folder (``TORCHINDUCTOR_CACHE_DIR``), that one
is used, and nothing is deleted.
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

from cocor.config import Config
from cocor.distributed import ranks
from loaders.cache import user_cache
from loaders.names import printable

VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
LIMIT = 5 << 30  # bytes
_STAYS = 24 * 3600.0  # seconds after the last use
_LOOKING, _REMOVING = 0.5, 0.5  # seconds, at most
_MARK, _REMOVED = "used", ".removed"
_log = logging.getLogger(__name__)
_held: list[int] = []  # file descriptors, for as long as this process lives


def keep(config: Config) -> None:
    """Let the compiler keep what it makes for ``config`` beside our other caches rather than in /tmp, which machines
    empty and do not share."""
    if not _is_default(os.environ.get(VARIABLE)):
        return
    folder = user_cache() / "compiled"
    place = folder / _name(config)
    try:
        _use(place)
    except OSError:  # PyTorch's own default has to do
        return
    os.environ[VARIABLE] = str(place)
    try:
        prune(folder)
    except OSError as fault:
        _log.warning(f"old compiled code in {printable(folder)} cannot be removed ({fault.strerror})")


def prune(folder: Path) -> None:
    """Remove what exceeds ``LIMIT`` in ``folder``, as the module says. One line is logged if something goes."""
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
    """The folders that should go, or None if that cannot be found out in time."""
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
    """Of all files below, in bytes of the disk."""
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
    """Note that this process uses ``place``, until it ends, and make it where it is not there. OSError if it cannot be
    written to."""
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
    """Move ``place`` to the ``removed`` ones, if nobody uses it."""
    with suppress(BlockingIOError, FileNotFoundError), (place / _MARK).open("a") as mark:
        fcntl.flock(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _is_at(mark.fileno(), place):
            removed.mkdir(exist_ok=True)
            place.rename(removed / f"{place.name}-{os.getpid()}-{time.time_ns()}")
            return True
    return False


def _is_at(mark: int, place: Path) -> bool:
    """Whether this open file is the mark of the folder that is there now: another process may have moved it away."""
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(mark), (place / _MARK).stat())
    return False


def _name(config: Config) -> str:
    """Of what runs with like programs share, on however many ranks. Those that differ in other things can share it
    too."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    images = config.batch_size // ranks()
    name = f"torch-{torch.__version__}-{device}-{config.backbone}-{config.image_size}px-{images}"
    return re.sub(r"[^\w.+-]+", "-", name)


def _is_default(folder: str | None) -> bool:
    """Whether nobody has chosen ``folder``: PyTorch sets the variable to its own default while it loads."""
    if folder is None:
        return True
    with suppress(ImportError, KeyError, OSError):  # elsewhere in other versions; a user without a name
        from torch._inductor.runtime.cache_dir_utils import default_cache_dir

        return folder == default_cache_dir()
    return False
