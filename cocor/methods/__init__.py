"""Register the contrastive methods, one file and one line of :data:`METHODS` each.

The class (a :class:`cocor.methods.base.Method`) owns its defaults, options and checks. To add one from a script:
``METHODS["mine"] = Mine``, then ``cocor.train.main(["--method", "mine", ...])``; on several GPUs under torchrun.
"""

import ast
import importlib
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any

from loaders.errors import UserError

# The choices of --method: a class, or where to find it.
METHODS: dict[str, Any] = {
    "moco": "cocor.methods.moco:MoCo",
    "simsiam": "cocor.methods.simsiam:SimSiam",
    "supcon": "cocor.methods.supcon:SupCon",
    "byol": "cocor.methods.byol:BYOL",
    "intl": "cocor.methods.intl:INTL",
    "simclr": "cocor.methods.simclr:SimCLR",
    "barlow": "cocor.methods.barlow:BarlowTwins",
    "vicreg": "cocor.methods.vicreg:VICReg",
}


@dataclass(frozen=True)
class Spec:
    """Literals in the body of the class of a method or of an auxiliary."""

    title: str  # the name of the class
    defaults: dict[str, Any] = field(default_factory=dict)
    options: tuple[str, ...] = ()
    needs_labels: bool = False
    composites: bool = False
    original: bool = False
    view_parameters: bool = False


def spec(name: str, table: Mapping[str, Any] = METHODS) -> Spec:
    """Return the literals of the class ``name`` in ``table``, without importing it."""
    entry = _entry(name, table)
    if isinstance(entry, str):
        return _read(entry)
    declared = {key.name: getattr(entry, key.name) for key in fields(Spec)[1:] if hasattr(entry, key.name)}
    return Spec(entry.__name__, **declared)


def owners(table: Mapping[str, Any] = METHODS) -> dict[str, list[str]]:
    """Map each option that is for some names of ``table`` only to these names."""
    keys = dict.fromkeys(key for name in table for key in spec(name, table).options)
    return {key: [name for name in table if key in spec(name, table).options] for key in keys}


def method_class(name: str, table: Mapping[str, Any] = METHODS) -> Any:
    """Import the class called ``name`` in ``table``."""
    entry = _entry(name, table)
    if not isinstance(entry, str):
        return entry
    module, _, name = entry.partition(":")
    return getattr(importlib.import_module(module), name)


def _entry(name: str, table: Mapping[str, Any]) -> Any:
    if name not in table:  # of a checkpoint, whose program has added it
        what = "method" if table is METHODS else "auxiliary"
        raise UserError(f"{what} {name}: unknown here; there are {', '.join(table)}")
    return table[name]


@cache
def _read(entry: str) -> Spec:
    # From the source: importing PyTorch takes seconds, for which neither --help nor the report of a mistake waits.
    module, _, name = entry.partition(":")
    source: Any = importlib.util.find_spec(module)
    tree = ast.parse(source.loader.get_source(module))
    (body,) = (node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    assigned = {ast.unparse(node.targets[0]): node.value for node in body if isinstance(node, ast.Assign)}
    return Spec(
        name, **{key.name: ast.literal_eval(assigned[key.name]) for key in fields(Spec) if key.name in assigned}
    )
