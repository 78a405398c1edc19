"""Work that ranks do in turn or side by side, such that a user's mistake on one of them is one on all.

No rank then waits for, or complains of, one that has left. Failures at other moments: :mod:`cocor.leaving`.
"""

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from cocor.distributed import ranks
from loaders.errors import UserError

T = TypeVar("T")


def on_main(work: Callable[[], object]) -> None:
    """Do ``work`` on the main rank, while the others wait; a UserError there is one on all ranks, so that none waits
    for, or complains of, a rank that has left for a user's mistake."""
    _share(_mistake(work) if _is_main() else None)


def main_first(work: Callable[[], T]) -> T:
    """What ``work`` gives, done by the main rank before the others; a UserError on any is one on all."""
    found: list[T] = []
    for turn in (True, False):
        _share(_mistake(lambda: found.append(work())) if _is_main() is turn else None)
    return found[0]


def together(work: Callable[[], T]) -> T:
    """What ``work`` gives, done by all ranks at once; a UserError on any is one on all."""
    found: list[T] = []
    _share(_mistake(lambda: found.append(work())))
    return found[0]


def _is_main() -> bool:
    return ranks() == 1 or dist.get_rank() == 0


def _mistake(work: Callable[[], object]) -> UserError | None:
    try:
        work()
        return None
    except UserError as error:
        return error


def _share(mistake: UserError | None) -> None:
    """Raise this rank's ``mistake`` or, if it made none, the first that another made."""
    if ranks() > 1:
        said: list[str | None] = [None] * ranks()
        dist.all_gather_object(said, None if mistake is None else str(mistake))
        other = next((message for message in said if message is not None), None)
        mistake = mistake or (None if other is None else UserError(other))
    if mistake is not None:
        raise mistake
