"""What the flags of cocor-eval and of all benchmarks take, for argparse: a mistake is told before any work."""

import argparse
import math
from pathlib import Path

from loaders.errors import UserError
from loaders.writable import check_file


def whole(text: str) -> int:
    """A whole number of 0 or more."""
    return _at_least(0, text)


def positive(text: str) -> int:
    """A whole number of 1 or more."""
    return _at_least(1, text)


def two_or_more(text: str) -> int:
    """A whole number of 2 or more."""
    return _at_least(2, text)


def seed(text: str) -> int:
    """A whole number that random generators take."""
    return _at_least(0, text, 2**63 - 1)


def workers(text: str) -> int:
    """Processes or threads; 0 leaves the number to the machine."""
    return _at_least(0, text, 1024)


def image_size(text: str) -> int:
    """Pixels a side; those of larger images would fill all memory."""
    return _at_least(1, text, 4096)


def above_zero(text: str) -> float:
    """A finite number above 0."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a number above 0")
    return number


def share(text: str) -> float:
    """A number from 0 to 1."""
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not a number from 0 to 1")
    return number


def writable(text: str) -> Path:
    """A file that can be written; it is written much later."""
    try:
        check_file("", Path(text))
    except UserError as error:
        raise argparse.ArgumentTypeError(str(error).strip()) from None
    return Path(text)


def _at_least(low: int, text: str, high: int = 2**31 - 1) -> int:
    if not text.isdecimal() or (len(text) < 100 and int(text) < low):
        raise argparse.ArgumentTypeError(f"{text[:100]} is not a whole number of {low} or more")
    if len(text) >= 100 or int(text) > high:
        raise argparse.ArgumentTypeError(f"{text[:100]} is too large; the most is {high}")
    return int(text)
