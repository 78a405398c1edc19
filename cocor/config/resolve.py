"""Resolve defaults, YAML and flags into the configuration of a run.

    defaults  <  the method's own  <  --preset  <  YAML (--config, may build on another by ``defaults:``)  <  flags

``load`` does all of it; only the last check, by the method's class, imports PyTorch.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from cocor.auxiliary import AUXILIARIES
from cocor.config import parse
from cocor.config.checks import check
from cocor.config.options import BEFORE, PRESETS, Config
from cocor.config.parse import shown
from cocor.methods import METHODS, owners, spec
from loaders.arguments import nearest
from loaders.channels import GREY_MEAN, GREY_STD
from loaders.errors import UserError

GROUPS = {  # the first field of each group
    "data": "data and output",
    "method": "model and optimisation",
    "queue_size": "methods",
    "consistency": "CoCor",
    "auxiliary": "auxiliaries",
    "crop_scale_min": "contrastive views",
    "gpus": "machine",
    "log_every": "reports and checkpoints",
}

_NOTES = {  # shown in the help in place of a default
    "output": "default: runs/NAME, after the config file or the method",
    "mean": f"default: ImageNet's, {shown(Config.mean)}; grey: {shown(GREY_MEAN)}",
    "std": f"default: {shown(Config.std)}; grey: {shown(GREY_STD)}",
    "gpus": "default: all",
    "precision": "default: bf16 on GPUs, fp32 on the CPU",
    "execution": "auto: fused in long runs on GPUs, graph in short ones, eager on the CPU",
    "mmnn_lr": f"default: {shown(Config.mmnn_lr)}; SGD: 0.05, for moco and simsiam 0.5",
    "trace_weight": "default: 0.01 (log2(batch) - 3)",
}

_DESCRIPTION = "Pre-train an image encoder with CoCor. A flag overrides --config, which overrides the defaults."


def load(argv: Sequence[str] | None = None) -> Config:
    """Return the checked configuration for a command line, by default this one.

    Ends the process on ``--help``.

    Raises:
        UserError: any unknown key or flag, wrong value, unreadable file or contradiction, in one line.
    """
    return read(argv)[0]


def configure(recipe: str | Path | None = None, **options: Any) -> Config:
    """Complete ``options`` by a recipe's and the method's defaults, and check them.

    ``recipe`` is a YAML file. ``options`` are the fields of :class:`Config`, with values as in such a file.

    Raises:
        UserError: as :func:`load`.
    """
    kinds, file = parse.kinds(Config), None if recipe is None else Path(recipe)
    for key in options:
        if key not in kinds:
            raise UserError(f"{key}: no such option{nearest(key, kinds)}")
    given = {key: parse.convert(key, value, kinds[key]) for key, value in options.items()}
    return resolve(_from_file(file) | given, name=None if file is None else file.stem)


def read(argv: Sequence[str] | None = None) -> tuple[Config, list[str]]:
    """Do as :func:`load`, and also return the keys of the flags that were given."""
    titles = {
        key: ", ".join(spec(name, table).title for name in names)
        for table in (METHODS, AUXILIARIES)
        for key, names in owners(table).items()
    }
    parser = parse.parser(Config, "cocor-train", _DESCRIPTION, GROUPS, _NOTES | _method_notes(), titles)
    flags, file = parse.read_flags(Config, parser, sys.argv[1:] if argv is None else argv)
    return resolve(_from_file(file) | flags, name=None if file is None else file.stem), list(flags)


def _from_file(file: Path | None) -> dict[str, Any]:
    """Read the values of ``--config``."""
    values = {} if file is None else parse.read_yaml(Config, file)
    if len(values) > len(fields(Config)) // 2:  # the file of a run, which names all options that there were
        values = BEFORE | values
    return values


def _method_notes() -> dict[str, str]:
    """Describe defaults by method or auxiliary: ``default: 0.03; simsiam: 0.05``."""
    plain = Config()
    own = {name: spec(name, table).defaults for table in (METHODS, AUXILIARIES) for name in table}
    notes = {}
    for key in dict.fromkeys(key for values in own.values() for key in values):
        general = getattr(plain, key)
        others = {method: values[key] for method, values in own.items() if values.get(key, general) != general}
        parts = [f"default: {shown(general)}", *(f"{method}: {shown(value)}" for method, value in others.items())]
        notes[key] = "; ".join(parts)
    return notes


def resolve(values: Mapping[str, Any], name: str | None = None) -> Config:
    """Complete ``values`` by defaults (auxiliary, method, general), and check them.

    ``name`` (the config file's stem) names the default output folder.
    """
    method, auxiliary = values.get("method", Config.method), values.get("auxiliary", Config.auxiliary)
    parts = [method]
    if values.get("consistency", Config.consistency) != "none":
        parts.append("cocor")
    if auxiliary != "none":
        parts.append(auxiliary)
    folder = Path("runs") / (name or "_".join(parts))
    preset = PRESETS.get(values.get("preset", Config.preset), {})  # an unknown one fails below
    defaults = spec(method).defaults | preset | spec(auxiliary, AUXILIARIES).defaults
    epochs = values.get("epochs", defaults.get("epochs", Config.epochs))
    if "warmup_epochs" in defaults:  # a short run has no room for the warm-up of a long one
        defaults = defaults | {"warmup_epochs": min(defaults["warmup_epochs"], epochs // 10)}
    if values.get("optimiser") == "adamw":  # MoCo v3's for ViTs, whose rate is for a batch of 256
        defaults = defaults | {"lr": 1.5e-4, "weight_decay": 0.1}
    if values.get("in_chans") == 1:
        defaults = defaults | {"mean": GREY_MEAN, "std": GREY_STD}
    if values.get("mmnn_optimiser", Config.mmnn_optimiser) != "adam":
        # The authors' rate, which belongs to the loss as printed; ten times it won on CIFAR-10 with the sharper one.
        defaults = defaults | {"mmnn_lr": 0.5 if defaults.get("consistency_beta", 1.0) > 1.0 else 0.05}
    config = Config(**{"output": folder, **defaults, **_mmnn_start(values, epochs), **values})
    if config.in_chans == 3:
        mean, std = (values * 3 if len(values) == 1 else values for values in (config.mean, config.std))
        config = replace(config, mean=mean, std=std)
    check(config)
    return config


def _mmnn_start(values: Mapping[str, Any], epochs: int) -> dict[str, int]:
    """Return the MMNN's default wait and warm-up; 0 in a run too short for them."""
    keys = ("mmnn_wait_epochs", "mmnn_warmup_epochs")
    defaults = {key: getattr(Config, key) for key in keys if key not in values}
    given = sum(values[key] for key in keys if key in values)
    return defaults if given + sum(defaults.values()) < epochs else dict.fromkeys(defaults, 0)
