"""Parse flags and YAML files into the typed values of a flat dataclass of options.

A field's annotation is the type of its value; its metadata (see :func:`option`) hold help, bounds and choices. All
values go through one strict :func:`convert`: ``1e-3`` is a number, ``"False"`` is never true, and every error names the
key, the value and what is allowed; that of an unknown key or flag names the nearest.
"""

import argparse
import dataclasses
import math
import os
import re
import reprlib
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import yaml

from loaders.arguments import Parser, nearest
from loaders.errors import UserError

_shortened = reprlib.Repr()  # a few lines of YAML with anchors can make a list too large to print
_shortened.maxlevel, _shortened.maxlist, _shortened.maxdict = 2, 9, 9
_shortened.maxstring = _shortened.maxother = 200

_WORDS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}


def option(default: Any, help: str, *, low: float | None = None, high: float | None = None, bare: str | None = None,
           choices: Collection[str] | None = None) -> Any:  # fmt: skip
    """Make a dataclass field.

    ``low`` and ``high`` bound a number, both included; ``bare`` is the value of a bare flag; ``choices`` are the
    allowed texts where a program may add some.
    """
    metadata = {"help": help, "low": low, "high": high, "bare": bare, "choices": choices}
    return dataclasses.field(default=default, metadata=metadata)


def kinds(options: type) -> dict[str, Any]:
    """Return the type of each field of ``options``; that of choices is a Literal."""
    hints = get_type_hints(options)
    choices = {field.name: field.metadata["choices"] for field in dataclasses.fields(options)}
    return {name: hints[name] if choices[name] is None else Literal[tuple(choices[name])] for name in choices}


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
    """Convert ``value``, a flag's string or whatever YAML has parsed, to ``kind``.

    ``kind`` is int, float, bool, str, Path, a Literal, a tuple of these, or any of them ``| None``.

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
    """Format ``value`` as one would write it on the command line."""
    if isinstance(value, tuple):
        return ",".join(shown(part) for part in value)
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


def flag(key: str) -> str:
    """Return the flag of the option ``key``."""
    return "--" + key.replace("_", "-")


def parser(options: type, prog: str, description: str, groups: Mapping[str, str], notes: Mapping[str, str],
           owners: Mapping[str, str]) -> argparse.ArgumentParser:  # fmt: skip
    """Make a parser with one flag per field.

    ``groups`` maps the first field of each group to the group's title, ``notes`` fields to what the help shows in place
    of their defaults, ``owners`` fields to a word before their help.
    """
    usage = f"{prog} [--config FILE] [flags]"
    result = Parser(prog, usage, description, formatter_class=_Help, allow_abbrev=False)
    recipe = "a recipe, such as configs/moco_in100.yaml; flags override it"
    result.add_argument("--config", metavar="FILE", action="append", default=[], help=recipe)
    group: Any = result
    for field, kind in zip(dataclasses.fields(options), kinds(options).values(), strict=True):
        if field.name in groups:
            group = result.add_argument_group(groups[field.name])
        help = f"{owners[field.name]}: " if field.name in owners else ""
        _add_flag(group, field, kind, help + field.metadata["help"], notes.get(field.name))
    return result


def _add_flag(group: Any, field: dataclasses.Field[Any], kind: Any, help: str, note: str | None) -> None:
    default = f" ({note})" if note else "" if field.default is None else f" (default: {shown(field.default)})"
    words: dict[str, Any] = {"dest": field.name, "default": argparse.SUPPRESS}
    hidden = words | {"help": argparse.SUPPRESS}
    words |= {"metavar": _metavar(kind), "help": f"{help}{default}".replace("%", "%%")}
    bare = "true" if kind is bool else field.metadata["bare"]
    if bare is not None:
        words |= {"nargs": "?", "const": bare}
    group.add_argument(flag(field.name), **words)
    if kind is bool:
        group.add_argument(flag(f"no_{field.name}"), action="store_const", const="false", **hidden)


def read_flags(options: type, arguments: argparse.ArgumentParser,
               argv: Sequence[str]) -> tuple[dict[str, Any], Path | None]:  # fmt: skip
    """Parse ``argv`` into the values of its flags and the file of ``--config``."""
    known, rest = arguments.parse_known_args(_with_negative_values(argv))
    types_of = kinds(options)
    if rest:
        word = next((word for word in rest if word.startswith("-")), rest[0]).split("=")[0]
        what = "unknown flag" if word.startswith("-") else "unexpected argument"
        raise UserError(f"{what} {word}{nearest(word, ['--config', *map(flag, types_of)])}")
    values = vars(known)
    files = values.pop("config")
    if len(files) > 1:
        raise UserError("--config is given twice; let one file name the other with `defaults:`")
    converted = {key: convert(flag(key), value, types_of[key]) for key, value in values.items()}
    return converted, convert("--config", files[0], Path) if files else None


def _with_negative_values(argv: Sequence[str]) -> list[str]:
    """Join ``--constants -0.1`` by an equals sign, as it is no flag."""
    words: list[str] = []
    for word in argv:
        if re.match(r"-\.?\d", word) and words and words[-1].startswith("--") and "=" not in words[-1]:
            words[-1] += f"={word}"
        else:
            words.append(word)
    return words


class _Help(argparse.HelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=34, width=118)


def _metavar(kind: Any) -> str:
    if get_origin(kind) in (Union, types.UnionType):
        kind = get_args(kind)[0]
    if get_origin(kind) is Literal:
        return "{" + ",".join(get_args(kind)) + "}"
    if get_origin(kind) is tuple:
        return f"{_metavar(get_args(kind)[0])},..."
    return {int: "INT", float: "FLOAT", str: "TEXT", Path: "PATH", bool: "BOOL"}[kind]


class _TextLoader(yaml.BaseLoader):
    """YAML whose scalars stay text, as convert() knows the type of a key; repeated keys are an error."""

    # YAML would parse 010 as eight, 1:30 as ninety, and the name of a folder 2024_01_02 as 20240102.

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(None, None, f"{key} is given twice", node.start_mark)
        return super().construct_mapping(node, deep)


_TextLoader.add_implicit_resolver("tag:yaml.org,2002:null", re.compile("(~|null|)$"), ["~", "n", ""])
_TextLoader.add_constructor("tag:yaml.org,2002:null", lambda loader, node: None)


def read_yaml(options: type, path: Path, chain: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Read a YAML file over the one that its ``defaults:`` names, relative to it.

    Raises:
        UserError: missing, malformed or circular files, unknown or repeated keys, values of the wrong type.
    """
    resolved = path.resolve()
    if resolved in chain:
        loop = " -> ".join(link.name for link in (*chain, resolved))
        raise UserError(f"{path}: `defaults` goes round in a circle: {loop}")
    values = _mapping(path, "" if not chain else f" (defaults: of {chain[-1].name})")
    base = values.pop("defaults", None)
    inherited = {}
    if base is not None:
        base = convert(f"{path}: defaults", _as_in_a_shell(base), Path)
        inherited = read_yaml(options, path.parent / base, (*chain, resolved))
    hints = kinds(options)
    for key in values:
        if key not in hints:
            raise UserError(f"{path}: unknown key {key}{nearest(str(key), hints)}")
    for key, value in values.items():
        if Path in (hints[key], *get_args(hints[key])):
            values[key] = _as_in_a_shell(value)
    return inherited | {key: convert(f"{path}: {key}", value, hints[key]) for key, value in values.items()}


def _as_in_a_shell(value: Any) -> Any:
    """Expand the ``$VARIABLES`` of a path, as a shell does it for flags."""
    return os.path.expandvars(value) if isinstance(value, str) else value


def _mapping(path: Path, origin: str) -> dict[Any, Any]:
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), _TextLoader)
    except OSError as error:
        raise UserError(f"--config {path}{origin}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise UserError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise UserError(f"{path}: expected lines of `key: value`")
    return values
