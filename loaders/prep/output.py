"""Atomic outputs of ``cocor-prep``: they appear only when complete.

An output is made in a hidden, locked folder beside its target, flushed to the disk and renamed. A process that dies
leaves at most this folder, which loaders skip and the next run for the same target removes.
"""

import glob
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from loaders.datasets.manifest import FOLDER_RECORD
from loaders.errors import UserError, explain
from loaders.files import check_folder, sync
from loaders.text import printable


@contextmanager
def staged(target: Path, *, folder: bool, force: bool = False) -> Iterator[Path]:
    """Yield a temporary path that becomes ``target`` if the block succeeds.

    ``folder``: the path is that of an empty folder, not of a file to write. ``force``: replace an existing target.
    UserError if ``target`` exists or may not be replaced, its parent is missing, or the disk is full.
    """
    target = target.absolute()
    refuse_existing(target, force)
    remove_stale(target)
    try:
        with _locked_folder(target) as work:
            content = work / "content"
            if folder:
                content.mkdir()
            yield content
            _publish(content, target, force)
    except OSError as error:
        reason = explain(error) or error.strerror or error
        raise UserError(f"{printable(target)}: {reason}; nothing was kept") from error


@contextmanager
def _locked_folder(target: Path) -> Iterator[Path]:
    """Yield a folder beside ``target``, locked and in the end removed."""
    while True:
        work = Path(tempfile.mkdtemp(prefix=f".{target.name}.partial-", dir=target.parent))
        lock = _lock(work)
        with suppress(Timeout, FileNotFoundError):  # another process took it for stale before it was locked
            lock.acquire()
            break
    try:
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)
        lock.release()


def _lock(work: Path) -> FileLock:
    return FileLock(work / "lock", timeout=0)


def remove_stale(target: Path) -> None:
    """Remove temporary outputs of ``target`` that no living process holds."""
    for work in target.parent.glob(f".{glob.escape(target.name)}.partial-*"):
        with suppress(OSError), _lock(work):  # an OSError if another process is at work there
            shutil.rmtree(work, ignore_errors=True)


def _publish(content: Path, target: Path, force: bool) -> None:
    """Flush ``content`` to the disk and rename it to ``target``."""
    if content.is_dir():
        os.sync()  # thousands of fsyncs would take minutes
    else:
        sync(content)
    if os.path.lexists(target):
        if not force:  # made by somebody else in the meantime
            raise _exists(target)
        if content.is_dir() or not target.is_file():  # folders do not replace, nor are replaced, in one step
            target.rename(content.with_name("replaced"))
    content.replace(target)


def _exists(target: Path) -> UserError:
    return UserError(f"{printable(target)} exists; name another output or pass --force to replace it")


def refuse_existing(target: Path, force: bool) -> None:
    """Raise a UserError unless ``target`` can be made, or replaced if ``force``."""
    if not os.path.isdir(target.parent):  # noqa: PTH112 (a Path's own would raise where a folder on the way is locked)
        parent, name = printable(target.parent), printable(target.name)
        raise UserError(f"{parent}: no such folder for the output {name}; make it first")
    check_folder("output", target.parent, named=target)
    if not os.path.lexists(target):
        return
    if not force:
        raise _exists(target)
    if not _replaceable(target):
        only = "--force replaces files and folders that cocor-prep made, and this is neither; name another output"
        raise UserError(f"{printable(target)}: {only}")


def _replaceable(target: Path) -> bool:
    """Tell whether ``target`` may be replaced: a file, or a folder that was made here."""
    if target.is_symlink() or target.is_file():
        return True
    return target.is_dir() and (not any(target.iterdir()) or (target / FOLDER_RECORD).exists())


def refuse_overlap(output: Path, *sources: Path) -> None:
    """Raise a UserError if ``output`` would replace or lie inside one of ``sources``."""
    itself = output.name in ("", "..")  # such as "."
    inner = output.resolve() if itself else output.absolute().parent.resolve() / output.name
    for source in sources:
        outer = source.resolve()
        if inner == outer or outer.is_relative_to(inner):
            raise UserError(f"{printable(output)}: the output would replace its own source; name another output")
        links = [entry.resolve() for entry in source.iterdir() if entry.is_symlink()] if source.is_dir() else []
        if any(inner.is_relative_to(place) for place in (outer, *links)):
            raise UserError(f"{printable(output)}: the output lies inside its source; name another output")
