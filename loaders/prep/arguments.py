"""Arguments of a command whose every mistake is one line: an unknown flag names the nearest, a number its bounds."""

import argparse
import difflib
import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

from loaders.errors import UserError
from loaders.names import printable


class Parser(argparse.ArgumentParser):
    """Raises :class:`UserError` where argparse would print its usage and leave."""

    def error(self, message: str) -> NoReturn:
        message = message.removeprefix("argument ")
        choice = re.search(r"invalid choice: '(.*)' \(choose from (.*)\)", message, re.DOTALL)
        if choice:
            known = re.findall(r"[\w-]+", choice[2])
            message = (
                f"{message[: choice.start()]}{choice[1]} is not one of {', '.join(known)}{_nearest(choice[1], known)}"
            )
        raise UserError(f"{printable(message)} ({self.prog} --help shows all)")

    def parse_all(self, arguments: Sequence[str]) -> argparse.Namespace:
        """Parse ``arguments``, the first of which names a command. A misspelt flag is told before what is missing."""
        commands = next(action for action in self._actions if isinstance(action, argparse._SubParsersAction))
        command = commands.choices.get(arguments[0]) if arguments else None
        if command is None:
            return self.parse_args(arguments)
        known = [flag for action in command._actions for flag in action.option_strings]
        for word in arguments[1:]:
            flag = word.partition("=")[0]
            if word.startswith("--") and flag not in (*known, "--"):
                command.error(f"unknown flag {flag}{_nearest(flag, known)}")
        options, rest = self.parse_known_args(arguments)
        if rest:
            command.error(f"unexpected argument {rest[0]}{_nearest(rest[0], known)}")
        return options


def whole(low: int, high: int | None = None) -> Callable[[str], int]:
    """The type of a flag: a whole number from ``low`` to ``high``."""

    def convert(text: str) -> int:
        bounds = f"at least {low:,}" if high is None else f"{low:,} to {high:,}"
        if not re.fullmatch(r"\s*[+-]?[0-9]{1,30}\s*", text):
            raise argparse.ArgumentTypeError(f"{text} is not a whole number, {bounds}")
        value = int(text)
        if value < low or (high is not None and value > high):
            raise argparse.ArgumentTypeError(f"{text} must be {bounds}")
        return value

    return convert


def fraction(text: str) -> float:
    """The type of a flag: a number above 0 and at most 1."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text} must be a number above 0 and at most 1, such as 0.01")
    return value


def _nearest(word: str, known: Iterable[Any]) -> str:
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else ""
