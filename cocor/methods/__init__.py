"""Register the contrastive methods, one file and one line of :data:`METHODS` each.

The class (a :class:`cocor.methods.base.Method`) owns its defaults, options and checks. To add one from a script:
``METHODS["mine"] = Mine``, then ``cocor.train.main(["--method", "mine", ...])``; on several GPUs under torchrun.
"""

import ast
import importlib
import importlib.util
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
    """Literals in the body of the class of a :class:`cocor.methods.base.Method`."""

    title: str  # the name of the class
    defaults: dict[str, Any] = field(default_factory=dict)
    options: tuple[str, ...] = ()
    needs_labels: bool = False


def spec(method: str) -> Spec:
    """Return what the class of ``method`` declares, without importing it."""
    entry = _entry(method)
    if isinstance(entry, str):
        return _read(entry)
    return Spec(entry.__name__, **{key.name: getattr(entry, key.name) for key in fields(Spec)[1:]})


def owners() -> dict[str, list[str]]:
    """Map each option that is for some methods only to these methods."""
    keys = dict.fromkeys(key for method in METHODS for key in spec(method).options)
    return {key: [method for method in METHODS if key in spec(method).options] for key in keys}


def method_class(method: str) -> Any:
    """Import the class of ``method``."""
    entry = _entry(method)
    if not isinstance(entry, str):
        return entry
    module, _, name = entry.partition(":")
    return getattr(importlib.import_module(module), name)


def _entry(method: str) -> Any:
    if method not in METHODS:  # of a checkpoint, whose program has added it
        raise UserError(f"method {method}: unknown here; there are {', '.join(METHODS)}")
    return METHODS[method]


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
