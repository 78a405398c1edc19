"""Work that ranks do in turn or at once, where a UserError on one of them is raised on all.

Otherwise the others would wait for, or complain about, a rank that has exited. Failures at any other moment are
:mod:`cocor.leaving`'s.
"""

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from cocor.distributed.collectives import ranks
from loaders.errors import UserError

T = TypeVar("T")


def on_main(work: Callable[[], object]) -> None:
    """Do ``work`` on the main rank while the others wait; a UserError there is raised on all ranks."""
    _raise_on_all(_mistake(work) if _is_main() else None)


def main_first(work: Callable[[], T]) -> T:
    """Do ``work`` on the main rank, then on the others; returns this rank's result. A UserError on one rank is raised
    on all."""
    result: list[T] = []
    for main_turn in (True, False):
        _raise_on_all(_mistake(lambda: result.append(work())) if _is_main() is main_turn else None)
    return result[0]


def together(work: Callable[[], T]) -> T:
    """Do ``work`` on all ranks at once; returns this rank's result. A UserError on any rank is raised on all."""
    result: list[T] = []
    _raise_on_all(_mistake(lambda: result.append(work())))
    return result[0]


def _is_main() -> bool:
    return ranks() == 1 or dist.get_rank() == 0


def _mistake(work: Callable[[], object]) -> UserError | None:
    """Do ``work``; returns the UserError that it raised, if it did."""
    try:
        work()
        return None
    except UserError as error:
        return error


def _raise_on_all(mistake: UserError | None) -> None:
    """Collective: raise this rank's ``mistake`` or, if it made none, that of the lowest rank that made one."""
    if ranks() > 1:
        messages: list[str | None] = [None] * ranks()
        dist.all_gather_object(messages, None if mistake is None else str(mistake))
        other = next((message for message in messages if message is not None), None)
        mistake = mistake or (None if other is None else UserError(other))
    if mistake is not None:
        raise mistake
