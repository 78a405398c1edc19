"""Flags for the fields of a flat dataclass (:mod:`cocor.config.values`); an unknown one is an error that names the
nearest."""

import argparse
import dataclasses
import re
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from cocor.config.values import convert, shown
from loaders.arguments import Parser, nearest
from loaders.errors import UserError


def flag(key: str) -> str:
    return "--" + key.replace("_", "-")


def parser(
    options: type, prog: str, description: str, groups: Mapping[str, str], notes: Mapping[str, str]
) -> argparse.ArgumentParser:
    """A parser with one flag per field. ``groups``: the first field of each group, and the group's title. ``notes``:
    what the help shows in place of a field's default."""
    usage = f"{prog} [--config FILE] [flags]"
    result = Parser(prog, usage, description, formatter_class=_Help, allow_abbrev=False)
    recipe = "a recipe, such as configs/moco_in100.yaml; flags override it"
    result.add_argument("--config", metavar="FILE", action="append", default=[], help=recipe)
    group: Any = result
    hints = get_type_hints(options)
    for field in dataclasses.fields(options):
        if field.name in groups:
            group = result.add_argument_group(groups[field.name])
        _add_flag(group, field, hints[field.name], notes.get(field.name))
    return result


def _add_flag(group: Any, field: dataclasses.Field[Any], kind: Any, note: str | None) -> None:
    default = f" ({note})" if note else "" if field.default is None else f" (default: {shown(field.default)})"
    words: dict[str, Any] = {
        "dest": field.name,
        "default": argparse.SUPPRESS,
        "metavar": _metavar(kind),
        "help": f"{field.metadata['help']}{default}".replace("%", "%%"),
    }
    bare = "true" if kind is bool else field.metadata["bare"]
    if bare is not None:
        words |= {"nargs": "?", "const": bare}
    group.add_argument(flag(field.name), **words)
    if kind is bool:
        negation: dict[str, Any] = {"dest": field.name, "default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
        group.add_argument(flag(f"no_{field.name}"), action="store_const", const="false", **negation)


def read_flags(
    options: type, arguments: argparse.ArgumentParser, argv: Sequence[str]
) -> tuple[dict[str, Any], Path | None]:
    """The converted values of the flags in ``argv`` and the file of ``--config``.

    Raises:
        UserError: an unknown flag (names the nearest), a missing value, or a value of the wrong type.
    """
    known, rest = arguments.parse_known_args(_with_negative_values(argv))
    hints = get_type_hints(options)
    if rest:
        word = next((word for word in rest if word.startswith("-")), rest[0]).split("=")[0]
        what = "unknown flag" if word.startswith("-") else "unexpected argument"
        raise UserError(f"{what} {word}{nearest(word, ['--config', *map(flag, hints)])}")
    values = vars(known)
    files = values.pop("config")
    if len(files) > 1:
        raise UserError("--config is given twice; let one file name the other with `defaults:`")
    converted = {key: convert(flag(key), value, hints[key]) for key, value in values.items()}
    return converted, convert("--config", files[0], Path) if files else None


def _with_negative_values(argv: Sequence[str]) -> list[str]:
    """``--constants -0.1,-0.2`` and the like joined by an equals sign: argparse would take such values for flags."""
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
