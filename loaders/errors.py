"""Errors that are no bug: users' mistakes, unusable images, lack of resources."""

import errno
import os

from loaders.text import printable

_REMEDIES = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "free some space, or name another folder"),
    **dict.fromkeys((errno.EROFS, errno.EACCES, errno.EPERM), "check its permissions, or name another one"),
    **dict.fromkeys((errno.EMFILE, errno.ENFILE), "raise the limit of open files (ulimit -n 4096)"),
    **dict.fromkeys((errno.EIO, errno.ESTALE, errno.ENOTCONN, errno.ENODEV), "is the disk still there?"),
    **dict.fromkeys((errno.ENAMETOOLONG, errno.ENOTDIR, errno.ELOOP, errno.EISDIR), "check the path"),
    errno.EFBIG: "raise the limit of a file's size (ulimit -f)",
    errno.ENOENT: "check the path, and whether something removes files meanwhile",
    errno.EAGAIN: "too many processes: lower --workers, or raise the limit (ulimit -u)",
}
_OF_THE_MACHINE = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
_LIMITS = (errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.EFBIG, errno.EAGAIN)  # libraries name these


class UserError(Exception):
    """Bad input: the message names the file, key or flag and says what to do about it.

    Commands print it as a single line and exit with code 2.
    """


class UnusableImage(UserError):
    """One image cannot be used, on any machine: a loader may go on without it."""


def remedy(number: int | None, otherwise: str) -> str:
    """Name the remedy for a failed write: raising a limit, or else ``otherwise``."""
    return _REMEDIES[number] if number in (errno.EFBIG, errno.EMFILE, errno.ENFILE) else otherwise


def no_fault_of_a_file(error: Exception) -> bool:
    """Return whether memory or file handles ran out, rather than the file being bad."""
    memory = isinstance(error, MemoryError) or "DefaultCPUAllocator" in str(error)
    return memory or (isinstance(error, OSError) and error.errno in _OF_THE_MACHINE)


def explain(error: Exception) -> str:
    """Explain an error that no bug caused in one line with a remedy; else ""."""
    words = " ".join(str(error).split())
    shown = words[:300]
    memory = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    if memory or any(said in words for said in ("DefaultCPUAllocator", os.strerror(errno.ENOMEM))):
        return f"out of memory: lower the batch size, the number of workers or other sizes ({shown or 'MemoryError'})"
    if "failed to map segment" in words:  # from the system's linker
        return f"a library does not fit into memory: free some, or raise the limit (ulimit -v) ({shown})"
    if "can't start new thread" in words:
        return "no more threads can be started: lower --workers, or raise the limit (ulimit -u)"
    if "driver version is insufficient" in words:
        return (
            "the GPU's driver is too old for the installed PyTorch or DALI: install builds for the CUDA version that "
            f"nvidia-smi names, for CUDA 12 nvidia-dali-cuda120 in place of nvidia-dali-cuda130 ({shown})"
        )
    if "No usable temporary directory" in words:
        return "no temporary folder can be written: free some space in /tmp, or set TMPDIR to a folder that has some"
    if isinstance(error, OSError) and error.errno in _REMEDIES:
        named = isinstance(error.filename, str | bytes)
        where = f"{printable(os.fsdecode(error.filename))}: " if named else ""
        return f"{where}{error.strerror}; {_REMEDIES[error.errno]}"
    wraps, lower = type(error) in (RuntimeError, ImportError), words.lower()  # not a connection's: its peer is to blame
    wrapped = (number for number in _LIMITS if wraps and os.strerror(number).lower() in lower)
    return next((f"{shown}; {_REMEDIES[number]}" for number in wrapped), "")
