"""Folder walk: hides what is hidden and follows every link once.

Hidden names (a leading dot) and the housekeeping of operating systems are no samples and no classes. A link is followed
if what it points to is not already part of the folder, so that loops end and each real file counts once; dangling
links, pipes and devices are never opened, only named.
"""

import os
import stat
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

AT_ONCE = 16  # questions to storage, which may take milliseconds to answer one
_CHUNK = 64  # entries a thread asks about in a row
_HOUSEKEEPING = frozenset({"__MACOSX", "Thumbs.db", "desktop.ini", "lost+found", "@eaDir"})


@dataclass
class Listing:
    """Relative names of a folder's files, with what identifies their content."""

    names: list[str] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)  # bytes
    mtimes: list[int] = field(default_factory=list)  # nanoseconds
    folders: list[str] = field(default_factory=list)  # directly in the root
    faults: list[tuple[str, str]] = field(default_factory=list)  # (name, reason) of what cannot be opened

    def take(self, places: list[int]) -> "Listing":
        """Take the files at ``places`` in that order."""
        names, sizes, mtimes = self.names, self.sizes, self.mtimes
        names, sizes, mtimes = [names[i] for i in places], [sizes[i] for i in places], [mtimes[i] for i in places]
        return replace(self, names=names, sizes=sizes, mtimes=mtimes)


def list_folder(root: str) -> Listing:
    """List everything visible below ``root``, sorted by folder in it, then by name."""
    with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="cocor-list") as pool:
        return _list(root, pool)


def _list(root: str, pool: Executor) -> Listing:
    listing = Listing()
    real_root = os.path.realpath(root)
    folders = {real_root}
    links = deque(_walk(root, "", listing, folders, pool))
    files = {f"{real_root}/{name}" for name in listing.names} if links else set()
    # Real files and folders come first, so a link never displaces what it points to; then links in their order.
    while links:
        name = links.popleft()
        target = os.path.realpath(f"{root}/{name}")
        if Path(target).is_dir():
            if "/" not in name:
                listing.folders.append(name)
            encloses_root = Path(real_root).is_relative_to(target)
            if target not in folders and not encloses_root:
                before = len(listing.names)
                links.extend(_walk(root, name, listing, folders, pool))
                files.update(os.path.realpath(f"{root}/{new}") for new in listing.names[before:])
        elif target not in files:
            files.add(target)
            _add_file(name, Path(root, name), listing)
    order = sorted(range(len(listing.names)), key=lambda i: sort_key(listing.names[i]))
    return replace(listing.take(order), folders=sorted(listing.folders), faults=sorted(listing.faults))


def is_hidden(name: str) -> bool:
    """Tell whether a file or folder of this name is no part of a data set."""
    return name.startswith(".") or name in _HOUSEKEEPING


def sort_key(name: str) -> tuple[str, str]:
    """Return (folder in the root or nothing, the rest)."""
    top, slash, rest = name.partition("/")
    return (top, rest) if slash else ("", name)


def _walk(root: str, top: str, listing: Listing, folders: set[str], pool: Executor) -> Iterator[str]:
    """Add what lies below ``top`` to ``listing`` and ``folders``; yield links."""
    pending = [top]
    while pending:
        folder = pending.pop()
        folders.add(os.path.realpath(f"{root}/{folder}"))
        try:
            with os.scandir(f"{root}/{folder}") as found:
                entries = sorted((entry for entry in found if not is_hidden(entry.name)), key=lambda entry: entry.name)
        except OSError as fault:
            listing.faults.append((folder or ".", fault.strerror or str(fault)))
            continue
        list(pool.map(_ask, [entries[at : at + _CHUNK] for at in range(0, len(entries), _CHUNK)]))
        for entry in entries:
            name = f"{folder}/{entry.name}" if folder else entry.name
            if entry.is_symlink():
                yield name
            elif entry.is_dir():
                pending.append(name)
                if not folder:
                    listing.folders.append(name)
            else:
                _add_file(name, entry, listing)


def _ask(entries: "Sequence[os.DirEntry[str]]") -> None:
    """Ask for the status of the files among ``entries``, which keep the answer."""
    for entry in entries:
        with suppress(OSError):  # it is asked for again
            if entry.is_file(follow_symlinks=False):
                entry.stat()


def _add_file(name: str, file: "os.DirEntry[str] | Path", listing: Listing) -> None:
    try:
        status = file.stat()
    except OSError as fault:
        dangling = isinstance(fault, FileNotFoundError)
        listing.faults.append((name, "a link to nothing" if dangling else fault.strerror or str(fault)))
        return
    if not stat.S_ISREG(status.st_mode):
        listing.faults.append((name, "not a regular file"))
        return
    listing.names.append(name)
    listing.sizes.append(status.st_size)
    listing.mtimes.append(status.st_mtime_ns)
