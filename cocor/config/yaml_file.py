"""A file of options in YAML, which may build on another one."""

import os
from pathlib import Path
from typing import Any, get_args, get_type_hints

import yaml

from cocor.config.values import convert
from loaders.arguments import nearest
from loaders.errors import UserError


class _AsWritten(str):
    """The text of a YAML scalar that YAML would parse as a number or a date."""

    def __repr__(self) -> str:
        return str(self)


class _StrictLoader(yaml.SafeLoader):
    """YAML's safe subset, but repeated keys are an error (YAML silently keeps the last), and numbers stay text for
    :func:`convert`, which knows the type of a key. YAML would parse 010 as eight, 1:30 as ninety, and the name of a
    folder 2024_01_02 as 20240102."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        if any(key.tag.endswith(":merge") for key, _ in node.value):
            raise yaml.constructor.ConstructorError(
                None, None, "<< is not known; name a file to build on with defaults:"
            )
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(None, None, f"{key} is given twice", node.start_mark)
        return super().construct_mapping(node, deep)


for _kind in ("int", "float", "timestamp"):
    _StrictLoader.add_constructor(f"tag:yaml.org,2002:{_kind}", lambda loader, node: _AsWritten(node.value))


def read_yaml(options: type, path: Path, chain: tuple[Path, ...] = ()) -> dict[str, Any]:
    """The values of a YAML file over those of the file that its ``defaults:`` names (relative to it), converted.

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
    hints = get_type_hints(options)
    for key in values:
        if key not in hints:
            raise UserError(f"{path}: unknown key {key}{nearest(str(key), hints)}")
    for key, value in values.items():
        if Path in (hints[key], *get_args(hints[key])):
            values[key] = _as_in_a_shell(value)
    return inherited | {key: convert(f"{path}: {key}", value, hints[key]) for key, value in values.items()}


def _as_in_a_shell(value: Any) -> Any:
    """A path with its ``$VARIABLES`` expanded, as a shell does it for flags."""
    return os.path.expandvars(value) if isinstance(value, str) else value


def _mapping(path: Path, origin: str) -> dict[Any, Any]:
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), _StrictLoader)
    except OSError as error:
        raise UserError(f"--config {path}{origin}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError, KeyError) as error:  # the last for `!!bool maybe`
        raise UserError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise UserError(f"{path}: expected lines of `key: value`")
    return values
