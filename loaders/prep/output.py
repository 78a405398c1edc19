"""Outputs that appear only when complete.

A file or folder is made under a hidden temporary name beside its target, flushed to the disk and renamed. A process
that dies leaves at most such a hidden name. Loaders skip hidden names, and the next run for the same target removes
those that no living process has locked.
"""

import contextlib
import ctypes
import errno
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from loaders.datasets.manifest import FOLDER_RECORD
from loaders.errors import UserError
from loaders.files import check_folder
from loaders.text import printable

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


@contextlib.contextmanager
def staged(target: Path, *, folder: bool, force: bool = False) -> Iterator[Path]:
    """Yield a temporary path that becomes ``target`` when the block ends without an error.

    Args:
        target: the file or folder to make; its parent must exist.
        folder: yield an empty folder instead of the path of a file to be written.
        force: replace an existing ``target`` (at the end, in one rename).

    Raises:
        UserError: ``target`` exists and ``force`` is off or may not replace it, its parent is missing, or the disk is
            full.
    """
    target = target.absolute()
    refuse_existing(target, force)
    remove_stale(target)
    work = None
    try:
        work, lock = _locked_folder(target)
        try:
            inner = work / "content"
            if folder:
                inner.mkdir()
            yield inner
            flush_tree(inner)
            publish(inner, target, force)
        finally:
            os.close(lock)
    except OSError as error:
        raise explain(error, target) from error
    finally:
        if work is not None:
            shutil.rmtree(work, ignore_errors=True)


def _locked_folder(target: Path) -> tuple[Path, int]:
    """A new temporary folder beside ``target``, and the open descriptor that locks it."""
    while True:
        work = Path(tempfile.mkdtemp(prefix=f".{target.name}.partial-", dir=target.parent))
        with contextlib.suppress(FileNotFoundError):  # another process took it for stale before it was locked
            lock = os.open(work, os.O_RDONLY)
            fcntl.flock(lock, fcntl.LOCK_EX)
            if work.is_dir():
                return work, lock
            os.close(lock)


def refuse_existing(target: Path, force: bool) -> None:
    """Raise a :class:`UserError` unless ``target`` may be made (it does not exist or ``force``; its parent exists and
    can be written)."""
    if not os.path.isdir(target.parent):  # noqa: PTH112 (a Path's own would raise where a folder on the way is locked)
        parent, name = printable(target.parent), printable(target.name)
        raise UserError(f"{parent}: no such folder for the output {name}; make it first")
    check_folder("output", target.parent, named=target)
    if not os.path.lexists(target):
        return
    if not force:
        raise UserError(f"{printable(target)} exists; name another output or pass --force to replace it")
    if not _replaceable(target):
        raise UserError(
            f"{printable(target)}: --force replaces files and folders that cocor-prep made, and this is neither; "
            "name another output"
        )


def _replaceable(target: Path) -> bool:
    """Whether an existing output may be replaced as a whole: never a device, nor a folder of anything else."""
    if target.is_symlink() or target.is_file():
        return True
    if not target.is_dir():
        return False
    names = os.listdir(target)  # noqa: PTH208 (names, not paths)
    return not names or FOLDER_RECORD in names


def refuse_overlap(output: Path, *sources: Path | None) -> None:
    """Raise a :class:`UserError` if ``output`` is one of ``sources``, would replace it, or lies inside it.

    An output inside a folder of images would become one of them.
    """
    itself = output.name in ("", "..")  # such as "."
    inner = output.resolve() if itself else output.absolute().parent.resolve() / output.name
    for source in sources:
        if source is None:
            continue
        outer = source.resolve()
        if inner == outer or outer.is_relative_to(inner):
            raise UserError(f"{printable(output)}: the output would replace its own source; name another output")
        links = [entry.resolve() for entry in source.iterdir() if entry.is_symlink()] if source.is_dir() else []
        if any(inner.is_relative_to(place) for place in (outer, *links)):
            raise UserError(f"{printable(output)}: the output lies inside its source; name another output")


def remove_stale(target: Path) -> None:
    """Remove temporary outputs of ``target`` that no living process holds."""
    for work in target.parent.glob(f".{glob_escape(target.name)}.partial-*"):
        try:
            lock = os.open(work, os.O_RDONLY | os.O_DIRECTORY)
        except OSError:
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            continue  # another process is at work there
        else:
            shutil.rmtree(work, ignore_errors=True)
        finally:
            os.close(lock)


def glob_escape(name: str) -> str:
    """``name`` with the characters that mean something to glob taken literally."""
    return "".join(f"[{c}]" if c in "*?[" else c for c in name)


def flush_tree(path: Path) -> None:
    """Flush a file, or everything below a folder, to the disk: one ``syncfs`` instead of thousands of slow fsyncs."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        syncfs = getattr(ctypes.CDLL(None, use_errno=True), "syncfs", None)
        if not path.is_dir() or syncfs is None:
            os.fsync(descriptor)
        elif syncfs(descriptor) != 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
    finally:
        os.close(descriptor)


def publish(source: Path, target: Path, force: bool) -> None:
    """Rename ``source`` to ``target`` in one step; with ``force`` what was there ends up under the name ``source``."""
    if force and os.path.lexists(target):
        if not _exchange(source, target):  # file systems without RENAME_EXCHANGE: two renames, old output kept aside
            target.rename(source.with_name("replaced"))
            source.rename(target)
    elif os.path.lexists(target):  # made by somebody else in the meantime
        raise UserError(f"{printable(target)} exists; name another output or pass --force to replace it")
    else:
        source.rename(target)
    descriptor = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _exchange(first: Path, second: Path) -> bool:
    """Swap two names atomically (Linux ``renameat2``); False where that is not possible."""
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError):
        return False
    return rename(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE) == 0


def explain(error: OSError, target: Path) -> UserError:
    """The one-line message for an error of the operating system while making ``target``."""
    name = printable(target)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return UserError(f"{name}: no space left on the disk of {printable(target.parent)}; nothing was kept")
    if error.errno == errno.EFBIG:
        return UserError(f"{name}: larger than the allowed file size (see ulimit -f); nothing was kept")
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return UserError(f"{name}: too many open files; lower --workers, or raise the limit (ulimit -n 8192)")
    if error.errno == errno.EAGAIN:
        return UserError(f"{name}: too many processes; lower --workers, or raise the limit (ulimit -u)")
    where = f" ({printable(os.fsdecode(error.filename))})" if isinstance(error.filename, str | bytes) else ""
    return UserError(f"{name}: {error.strerror or error}{where}")
