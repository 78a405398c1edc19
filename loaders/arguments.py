"""Command-line parsing with one-line errors, nearest names and stated bounds."""

import argparse
import difflib
import math
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from loaders import __version__
from loaders.errors import UserError
from loaders.files import check_file
from loaders.text import printable

_MOST = 2**31 - 1


class Parser(argparse.ArgumentParser):
    """Raise :class:`UserError` where argparse would print its usage and exit."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        if " " not in self.prog:  # not of a command's commands
            self.add_argument("--version", action="version", version=f"%(prog)s {__version__}")

    def error(self, message: str) -> NoReturn:
        message = message.removeprefix("argument ")
        choice = re.search(r"invalid choice: '(.*)' \(choose from (.*)\)", message, re.DOTALL)
        if choice:
            known = re.findall(r"[\w-]+", choice[2])
            message = (
                f"{message[: choice.start()]}{choice[1]} is not one of {', '.join(known)}{nearest(choice[1], known)}"
            )
        raise UserError(f"{printable(message)} ({self.prog} --help shows all)")

    def parse_all(self, arguments: Sequence[str] | None = None) -> argparse.Namespace:
        """Parse ``arguments`` (default: this process's), reporting a misspelt flag first."""
        arguments = sys.argv[1:] if arguments is None else arguments
        choices = next((a.choices for a in self._actions if isinstance(a, argparse._SubParsersAction)), None)
        command = self if choices is None else choices.get(arguments[0]) if arguments else None
        if command is None:
            return self.parse_args(arguments)
        known = [flag for action in command._actions for flag in action.option_strings]
        for word in arguments:
            flag = word.partition("=")[0]
            if word == "--":
                break
            if word.startswith("--") and flag not in known:
                command.error(f"unknown flag {flag}{nearest(flag, known)}")
        options, rest = self.parse_known_args(arguments)
        if rest:
            command.error(f"unexpected argument {rest[0]}{nearest(rest[0], known)}")
        return options


def nearest(word: str, known: Iterable[Any]) -> str:
    """Suggest the nearest known word, as ``"; did you mean X?"`` or nothing."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else ""


def whole(low: int, high: int = _MOST) -> Callable[[str], int]:
    """Make an argparse ``type``: integers from ``low`` to ``high``."""
    within = f"{low:,} to {high:,}"
    bounds, most = (f"at least {low:,}", f"at most {high:,}") if high == _MOST else (within, within)

    def convert(text: str) -> int:
        if not re.fullmatch(r"\s*[+-]?[0-9]+\s*", text):
            raise argparse.ArgumentTypeError(f"{text[:100]} is not a whole number, {bounds}")
        beyond = low - 1 if "-" in text else high + 1  # int() refuses text of thousands of digits
        value = int(text) if len(text) <= 30 else beyond
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text[:100]} must be {bounds if value < low else most}")
        return value

    return convert


not_negative, positive, two_or_more = whole(0), whole(1), whole(2)
seed = whole(0, 2**63 - 1)  # a signed 64-bit integer, as the compiled draws take it
workers = whole(0, 1024)  # processes or threads
image_size = whole(1, 4096)  # pixels a side; batches of larger crops would fill all memory


def _real(bounds: str, fits: Callable[[float], bool]) -> Callable[[str], float]:
    """Make an argparse ``type``: floats for which ``fits`` holds, but never NaN."""

    def convert(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not fits(value):
            raise argparse.ArgumentTypeError(f"{text[:100]} must be a number {bounds}")
        return value

    return convert


fraction = _real("above 0 and at most 1, such as 0.01", lambda value: 0 < value <= 1)
share = _real("from 0 to 1", lambda value: 0 <= value <= 1)
above_zero = _real("above 0", lambda value: 0 < value < math.inf)
zero_or_more = _real("of 0 or more", lambda value: 0 <= value < math.inf)


def a_channel(kind: Callable[[str], float]) -> Callable[[str], tuple[float, ...]]:
    """Make an argparse ``type``: ``kind`` for each channel, between commas."""
    return lambda text: tuple(map(kind, text.split(",")))


def writable(text: str) -> Path:
    """Take an output file (an argparse ``type``) that can be written, hours before."""
    try:
        check_file("", Path(text))
    except UserError as error:
        raise argparse.ArgumentTypeError(str(error).strip()) from None
    return Path(text)
