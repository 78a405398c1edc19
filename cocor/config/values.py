"""Options as fields of a flat dataclass, and the conversion of their values from files and flags.

A field's annotation is the type of its value; its metadata (see :func:`option`) hold help and bounds. All values go
through one strict :func:`convert`: ``1e-3`` is a number, ``"False"`` is never true, and every error names the key, the
value and what is allowed.
"""

import dataclasses
import math
import reprlib
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from loaders.arguments import nearest
from loaders.errors import UserError

_shortened = reprlib.Repr()  # a few lines of YAML with anchors can make a list too large to print
_shortened.maxlevel, _shortened.maxlist, _shortened.maxdict = 2, 9, 9
_shortened.maxstring = _shortened.maxother = 200

_WORDS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}


def option(
    default: Any, help: str, *, low: float | None = None, high: float | None = None, bare: str | None = None
) -> Any:
    """A dataclass field. ``low`` and ``high`` bound a number, both included; ``bare`` is the value of a bare flag."""
    return dataclasses.field(default=default, metadata={"help": help, "low": low, "high": high, "bare": bare})


def check_bounds(values: Any) -> None:
    """Raise a UserError if a number lies outside its field's ``low`` and ``high``."""
    for field in dataclasses.fields(values):
        low, high = field.metadata["low"], field.metadata["high"]
        value = getattr(values, field.name)
        for number in value if isinstance(value, tuple) else (value,):
            if number is not None and low is not None and number < low:
                raise UserError(f"{field.name}: {number} is too small; the least is {low}")
            if number is not None and high is not None and number > high:
                raise UserError(f"{field.name}: {number} is too large; the most is {high}")


def convert(key: str, value: Any, kind: Any) -> Any:
    """``value`` (a flag's string, or whatever YAML has parsed) as ``kind``: int, float, bool, str, Path, a Literal, a
    tuple of these, or any of them ``| None``.

    Raises:
        UserError: names key, value and what is allowed.
    """
    if get_origin(kind) in (Union, types.UnionType):
        (kind,) = (part for part in get_args(kind) if part is not type(None))
        if value is None or (isinstance(value, str) and value.lower() in ("none", "null")):
            return None
    try:
        if get_origin(kind) is Literal:
            return _choice(value, get_args(kind))
        if get_origin(kind) is tuple:
            return _sequence(key, value, get_args(kind))
        return _SCALARS[kind](value)
    except ValueError as error:
        raise UserError(f"{key}: {_shortened.repr(value)} is not {error}") from None


def _boolean(value: Any) -> bool:
    word = str(value).lower() if isinstance(value, str | int) else ""
    if word not in _WORDS:
        raise ValueError("true or false")
    return _WORDS[word]


def _integer(value: Any) -> int:
    number = _number(value, "a whole number")  # also takes 1e3
    if number != int(number):
        raise ValueError("a whole number")
    try:
        return int(value)
    except ValueError:
        return int(number)


def _number(value: Any, wanted: str = "a number") -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(wanted)
    try:
        number = float(value)
    except (ValueError, OverflowError):
        raise ValueError(wanted) from None
    if not math.isfinite(number):
        raise ValueError(f"{wanted} that is finite")
    return number


def _text(value: Any) -> str:
    if not isinstance(value, str | int | float | Path) or isinstance(value, bool) or value == "":
        raise ValueError("a text")
    return str(value)


def _path(value: Any) -> Path:
    text = _text(value)
    try:
        path = Path(text).expanduser()
    except RuntimeError:
        raise ValueError("a path: there is no such user") from None
    if "\0" in text:
        raise ValueError("a path")
    return path


def _choice(value: Any, allowed: tuple[str, ...]) -> str:
    if value not in allowed:
        hint = nearest(value, allowed) if isinstance(value, str) else ""
        raise ValueError(f"one of {', '.join(allowed)}{hint}")
    return str(value)


def _sequence(key: str, value: Any, kinds: tuple[Any, ...]) -> tuple[Any, ...]:
    if isinstance(value, str):
        value = [part.strip() for part in value.split(",")]
    parts = list(value) if isinstance(value, list | tuple) else [value]
    if kinds[-1] is Ellipsis:
        kinds = (kinds[0],) * len(parts)
    if len(parts) != len(kinds) or not parts:
        raise ValueError(f"{len(kinds) or 'some'} values such as {','.join('123'[: len(kinds)] or '1')}")
    return tuple(convert(key, part, kind) for part, kind in zip(parts, kinds, strict=True))


_SCALARS: dict[type, Callable[[Any], Any]] = {bool: _boolean, int: _integer, float: _number, str: _text, Path: _path}


def shown(value: Any) -> str:
    """``value`` as one would write it on the command line."""
    if isinstance(value, tuple):
        return ",".join(shown(part) for part in value)
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)
