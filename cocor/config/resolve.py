"""How a run's configuration comes about.

    defaults  <  the method's own defaults  <  YAML (--config, which may build on another by ``defaults:``)  <  flags

``load`` does all of it and imports nothing heavy, so that mistakes are reported at once.
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cocor.config import arguments
from cocor.config.checks import check
from cocor.config.options import Config, Method
from cocor.config.values import shown
from cocor.config.yaml_file import read_yaml

GROUPS = {  # the first field of each group
    "data": "data and output",
    "method": "model and optimisation",
    "queue_size": "methods",
    "consistency": "CoCor",
    "crop_scale_min": "contrastive views",
    "gpus": "machine",
    "log_every": "reports and checkpoints",
}

# BYOL and INTL share their views: the two differ in blur and solarising.
_ASYMMETRIC = {"crop_scale_min": 0.08, "saturation": 0.2, "blur_prob": (1.0, 0.1), "solarize_prob": (0.0, 0.2)}

# What the paper leaves open, as it won on CIFAR-10 (benchmarks/README.md); the other methods have the loss as printed.
_TUNED = {"consistency_beta": 8.0, "mmnn_lr": 0.5}

# What the paper's appendix on pre-training says, else the methods' authors. The paper's table of constants lists two
# methods; the others take MoCo's.
METHOD_DEFAULTS: dict[Method, dict[str, Any]] = {
    "moco": {"lr": 0.03, "constants": (0.80, 0.75, 0.65), "consistency_weight": 10.0, **_TUNED},
    "simsiam": {**{"lr": 0.05, "constants": (0.75, 0.70, 0.60), "sync_bn": True, "consistency_weight": 3.0}, **_TUNED},
    # The paper's rate; its authors' is 0.05 for this batch.
    "supcon": {"lr": 0.03, "epochs": 100, "temperature": 0.07, "final_lr": 1e-3, "blur_prob": (0.0,)},
    # The authors' rate and momentum for 300 epochs, the rate scaled from their batch of 4,096 to 256.
    "byol": {
        **{"optimiser": "lars", "lr": 0.3, "weight_decay": 1e-6, "decay_biases": False, "warmup_epochs": 10},
        **{"sync_bn": True, "key_momentum": 0.99, "embedding_dim": 256, "projector_dim": 4096, "predictor_dim": 4096},
        **_ASYMMETRIC,
    },
    "intl": {
        **{"lr": 0.5, "final_lr": 1e-3, "weight_decay": 1e-5, "decay_biases": False, "warmup_epochs": 2},
        **{"sync_bn": True, "embedding_dim": 8192, "projector_dim": 8192},
        **_ASYMMETRIC,
    },
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
    """The checked configuration that a command line (default: this process's) asks for. Ends the process on --help.

    Raises:
        UserError: any unknown key or flag, wrong value, unreadable file or contradiction, in one line.
    """
    return read(argv)[0]


def read(argv: Sequence[str] | None = None) -> tuple[Config, list[str]]:
    """As :func:`load`, with the keys of the flags that were on the command line."""
    parser = arguments.parser(Config, "cocor-train", _DESCRIPTION, GROUPS, _NOTES | _method_notes())
    flags, file = arguments.read_flags(Config, parser, sys.argv[1:] if argv is None else argv)
    values = flags if file is None else read_yaml(Config, file) | flags
    return resolve(values, name=None if file is None else file.stem), list(flags)


def _method_notes() -> dict[str, str]:
    """The defaults that depend on the method, for the help: ``default: 0.03; simsiam: 0.05``."""
    plain, keys = Config(), dict.fromkeys(key for values in METHOD_DEFAULTS.values() for key in values)
    return {
        key: "; ".join(
            [f"default: {shown(getattr(plain, key))}"]
            + [
                f"{method}: {shown(values[key])}"
                for method, values in METHOD_DEFAULTS.items()
                if values.get(key, getattr(plain, key)) != getattr(plain, key)
            ]
        )
        for key in keys
    }


def resolve(values: Mapping[str, Any], name: str | None = None) -> Config:
    """The checked configuration of ``values``; what they lack comes from the method's own defaults, else the general.

    ``name`` (the config file's stem) names the default output folder.
    """
    method = values.get("method", Config.method)
    baseline = values.get("consistency", Config.consistency) == "none"
    folder = Path("runs") / (name or f"{method}{'' if baseline else '_cocor'}")
    defaults = METHOD_DEFAULTS[method]
    epochs = values.get("epochs", defaults.get("epochs", Config.epochs))
    if "warmup_epochs" in defaults:  # a short run has no room for the warm-up of a long one
        defaults = defaults | {"warmup_epochs": min(defaults["warmup_epochs"], epochs // 10)}
    config = Config(**{"output": folder, **defaults, **_mmnn_start(values, epochs), **values})
    check(config)
    return config


def _mmnn_start(values: Mapping[str, Any], epochs: int) -> dict[str, int]:
    """The default wait and warm-up of the MMNN; 0 in a run too short for them, so that it learns at all."""
    keys = ("mmnn_wait_epochs", "mmnn_warmup_epochs")
    defaults = {key: getattr(Config, key) for key in keys if key not in values}
    given = sum(values[key] for key in keys if key in values)
    return defaults if given + sum(defaults.values()) < epochs else dict.fromkeys(defaults, 0)
