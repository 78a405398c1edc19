"""Resolve defaults, YAML and flags into the configuration of a run.

    defaults  <  the method's own defaults  <  YAML (--config, which may build on another by ``defaults:``)  <  flags

``load`` does all of it; only the last check, by the method's class, imports PyTorch.
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cocor.config import parse
from cocor.config.checks import check
from cocor.config.options import Config
from cocor.config.parse import shown
from cocor.methods import METHODS, spec

GROUPS = {  # the first field of each group
    "data": "data and output",
    "method": "model and optimisation",
    "queue_size": "methods",
    "consistency": "CoCor",
    "crop_scale_min": "contrastive views",
    "gpus": "machine",
    "log_every": "reports and checkpoints",
}

_NOTES = {  # shown in the help in place of a default
    "output": "default: runs/NAME, after the config file or the method",
    "gpus": "default: all",
    "precision": "default: bf16 on GPUs, fp32 on the CPU",
    "execution": "auto: fused in long runs on GPUs, graph in short ones, eager on the CPU",
    "trace_weight": "default: 0.01 (log2(batch) - 3)",
}

_DESCRIPTION = "Pre-train an image encoder with CoCor. A flag overrides --config, which overrides the defaults."


def load(argv: Sequence[str] | None = None) -> Config:
    """Return the checked configuration for a command line (default: this process's). Ends the process on --help.

    Raises:
        UserError: any unknown key or flag, wrong value, unreadable file or contradiction, in one line.
    """
    return read(argv)[0]


def read(argv: Sequence[str] | None = None) -> tuple[Config, list[str]]:
    """Do as :func:`load`, and return the keys of the flags that were on the command line as well."""
    notes, owners = _NOTES | _method_notes(), {key: ", ".join(titles) for key, titles in _owners().items()}
    parser = parse.parser(Config, "cocor-train", _DESCRIPTION, GROUPS, notes, owners)
    flags, file = parse.read_flags(Config, parser, sys.argv[1:] if argv is None else argv)
    values = flags if file is None else parse.read_yaml(Config, file) | flags
    return resolve(values, name=None if file is None else file.stem), list(flags)


def _method_notes() -> dict[str, str]:
    """Describe the defaults that depend on the method, for the help: ``default: 0.03; simsiam: 0.05``."""
    defaults = {method: spec(method).defaults for method in METHODS}
    plain, keys = Config(), dict.fromkeys(key for values in defaults.values() for key in values)
    return {
        key: "; ".join(
            [f"default: {shown(getattr(plain, key))}"]
            + [
                f"{method}: {shown(values[key])}"
                for method, values in defaults.items()
                if values.get(key, getattr(plain, key)) != getattr(plain, key)
            ]
        )
        for key in keys
    }


def _owners() -> dict[str, list[str]]:
    """Map the options that are for some methods only to the names of these."""
    owners: dict[str, list[str]] = {}
    for declared in map(spec, METHODS):
        for key in declared.options:
            owners.setdefault(key, []).append(declared.title)
    return owners


def resolve(values: Mapping[str, Any], name: str | None = None) -> Config:
    """Complete ``values`` by the method's own defaults, else the general ones, and check the result.

    ``name`` (the config file's stem) names the default output folder.
    """
    method = values.get("method", Config.method)
    baseline = values.get("consistency", Config.consistency) == "none"
    folder = Path("runs") / (name or f"{method}{'' if baseline else '_cocor'}")
    defaults = spec(method).defaults
    epochs = values.get("epochs", defaults.get("epochs", Config.epochs))
    if "warmup_epochs" in defaults:  # a short run has no room for the warm-up of a long one
        defaults = defaults | {"warmup_epochs": min(defaults["warmup_epochs"], epochs // 10)}
    config = Config(**{"output": folder, **defaults, **_mmnn_start(values, epochs), **values})
    check(config)
    return config


def _mmnn_start(values: Mapping[str, Any], epochs: int) -> dict[str, int]:
    """Return the default wait and warm-up of the MMNN; 0 in a run too short for them, so that it learns at all."""
    keys = ("mmnn_wait_epochs", "mmnn_warmup_epochs")
    defaults = {key: getattr(Config, key) for key in keys if key not in values}
    given = sum(values[key] for key in keys if key in values)
    return defaults if given + sum(defaults.values()) < epochs else dict.fromkeys(defaults, 0)
