"""Bad samples of a data set: images that turn out faulty while loaders run.

A data set and its subsets share one record, so that a fault is logged once per image, whichever loader hits it.
"""

import logging
from collections.abc import Sequence
from threading import Lock

_log = logging.getLogger(__name__)


class BadSamples:
    """The images that cannot be used at present, and those already reported, by name."""

    def __init__(self) -> None:
        self._unusable: set[str] = set()
        self._reported: set[tuple[str, str]] = set()
        self._lock = Lock()

    def __reduce__(self) -> tuple[type["BadSamples"], tuple[()]]:
        return BadSamples, ()  # a data set that is sent to another process starts anew there

    @property
    def unusable(self) -> frozenset[str]:
        with self._lock:
            return frozenset(self._unusable)

    def skip(self, name: str, why: str) -> None:
        """Note that ``name`` cannot be used, and log ``why`` the first time."""
        with self._lock:
            self._unusable.add(name)
            count = len(self._unusable)
        if self.unreported("unusable", [name]):
            _log.warning(f"{why}; skipped: another image takes its place ({count:,} so far)")

    def restore(self, name: str) -> None:
        """Note that ``name`` can be used again."""
        with self._lock:
            self._unusable.discard(name)

    def unreported(self, topic: str, names: Sequence[str]) -> list[str]:
        """Take those of ``names`` that have not been reported under ``topic``."""
        with self._lock:
            new = [name for name in names if (topic, name) not in self._reported]
            self._reported.update((topic, name) for name in new)
        return new
