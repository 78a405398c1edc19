"""Read tensors from a weight file of any origin, without running its code.

Reads ``.safetensors`` files and all that ``torch.load(weights_only=True)`` opens, also ``argparse.Namespace`` and
numpy's scalars and arrays. Paths, and objects that some packages keep beside the weights, such as configurations, are
replaced by inert stand-ins, so that these packages need not be installed.
"""

import argparse
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import safetensors
import safetensors.torch
import torch
from torch import Tensor

from loaders.errors import UserError, no_fault_of_a_file

Which = Literal["online", "ema"]

# Where training programs put their weights, searched in this order; the second word is for their moving average.
_ONLINE = ("state_dict", "model", "model_state_dict", "model_state", "network", "net")
_EMA = ("state_dict_ema", "model_ema", "ema", "ema_state_dict")
_HINTS = ("architecture", "stem", "image_size", "mean", "std")
_WRAPPERS = {"_orig_mod", "module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
# Packages whose objects lie beside weights. Stand-ins replace these, so the packages are neither imported nor needed.
_BESIDE = re.compile(r"(pathlib|collections|datetime|enum|omegaconf|mmengine|mmcv|yacs|addict|easydict|lightning"
                     r"|pytorch_lightning|lightning_fabric|classy_vision|vissl|solo|lightly)\.")  # fmt: skip
_NUMPY_KINDS = "?bBhHiIlLqQefd"
_LFS = b"version https://git-lfs.github.com/"


@dataclass(frozen=True)
class WeightFile:
    """Tensors by flat name, without wrappers' prefixes, and ``hints`` on the model.

    Hints are ``architecture``, ``stem``, ``image_size``, ``mean`` and ``std``. ``averaged``: all tensors are of a
    moving average, which the file keeps in a dict of its own.
    """

    path: Path
    tensors: dict[str, Tensor]
    hints: dict[str, str]
    averaged: bool = False

    def of_pixels(self, key: str) -> tuple[float, ...]:
        """Return the ``mean`` or ``std`` of pixels in [0, 1] by one or three channels; () if it tells none."""
        try:
            found: Any = json.loads(self.hints.get(key, "")) if "stem" in self.hints else None
        except ValueError:  # a word, in a configuration of another program
            return ()
        if not isinstance(found, list) or len(found) not in (1, 3):
            return ()
        low = 0 if key == "mean" else 1e-3
        return tuple(found) if all(isinstance(v, int | float) and low <= v <= 1 for v in found) else ()


def read_weights(path: Path, which: Which = "online") -> WeightFile:
    """Read ``path`` onto the CPU; ``which`` chooses among dicts of weights.

    Raises:
        UserError: missing, damaged, without tensors, or only to be opened by running code.
    """
    if not path.is_file():
        raise UserError(f"{path}: no such file of weights")
    if _beginning(path, len(_LFS)) == _LFS:
        raise UserError(f"{path}: is not the weights but Git LFS's pointer to them; run git lfs pull")
    if path.suffix == ".safetensors":
        return _read_safetensors(path)
    content = _read_pickle(path)
    if not isinstance(content, Mapping):
        raise UserError(f"{path}: holds a {type(content).__name__}, not weights by name; save model.state_dict()")
    part, averaged = _weights_of(content, which)
    tensors = _flat(part) or {name: torch.from_numpy(value.copy()) for name, value in part.items()
                              if isinstance(value, np.ndarray) and value.dtype.kind in "fi"}  # fmt: skip
    if not tensors:
        raise UserError(f"{path}: holds no weights; its keys are {', '.join(map(str, list(content)[:8])) or 'none'}")
    return WeightFile(path, _unwrapped(tensors), _hints(content), averaged)


def _read_safetensors(path: Path) -> WeightFile:
    try:
        with safetensors.safe_open(path, "pt") as file:
            hints = {key: value for key, value in (file.metadata() or {}).items() if key in _HINTS}
        tensors = safetensors.torch.load_file(path)
    except (OSError, safetensors.SafetensorError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from None
    if not tensors:
        raise UserError(f"{path}: holds no weights")
    return WeightFile(path, _unwrapped(tensors), hints)


def _beginning(path: Path, count: int) -> bytes:
    with path.open("rb") as file:
        return file.read(count)


def _read_pickle(path: Path) -> Any:
    harmless: list[Any] = [argparse.Namespace, np.ndarray, np.dtype, *{type(np.dtype(kind)) for kind in _NUMPY_KINDS}]
    for part in ("core", "_core"):
        harmless.append((np.float64(0).__reduce__()[0], f"numpy.{part}.multiarray.scalar"))
        harmless.append((np.zeros(1).__reduce__()[0], f"numpy.{part}.multiarray._reconstruct"))
    try:
        with torch.serialization.safe_globals(harmless + _stand_ins(path, harmless)):
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a broken file can fail anywhere in zip, pickle or torch
        if no_fault_of_a_file(error):
            raise
        text = str(error)
        if "Unsupported operand" in text and _beginning(path, 1) != b"\x80":  # a text, a picture, a website's page
            raise UserError(f"{path}: damaged, or no file of weights: torch.save did not write it") from None
        if "Unsupported global" in text or "weights_only" in text:
            culprit = text.partition("GLOBAL ")[2].split(" ")[0] or "code"
            loaded = "torch.load(FILE, weights_only=False)"
            code = f"torch.save({loaded}['state_dict'], NEW), or where that is a module, its .state_dict()"
            if culprit.startswith(("torchvision.models.", "timm.models.", "torch.nn.")):  # a whole module
                code = f"torch.save({loaded}.state_dict(), NEW)"
            raise UserError(f"{path}: opening it would run code of its own ({culprit}); where you trust it, keep only "
                            f"its tensors: {code}") from None  # fmt: skip
        reason = f"{type(error).__name__}: {text.splitlines()[0][:160]}" if text else type(error).__name__
        raise UserError(f"{path}: damaged, or no file of weights ({reason})") from None


class _StandIn:
    """Stand in for an object of a pickle: take its arguments and state, and drop them."""

    def __init__(self, *arguments: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        pass


def _stand_ins(path: Path, harmless: list[Any]) -> list[Any]:
    try:
        with torch.serialization.safe_globals(harmless):
            names = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    except Exception:  # a broken file, or one of the oldest format: torch.load will raise
        return []
    return [(_StandIn, name) for name in names if _BESIDE.match(name)]


def _weights_of(content: Mapping[Any, Any], which: Which) -> tuple[Mapping[Any, Any], bool]:
    """Return the part of a checkpoint that holds the weights, or all of it, and whether it holds averages only."""
    training = content.get("training")
    if isinstance(training, Mapping) and isinstance(training.get("method"), Mapping):
        return training["method"], False
    for key in (*_EMA, *_ONLINE) if which == "ema" else _ONLINE:
        part = content.get(key)
        if isinstance(part, Mapping) and _flat(part):
            return part, key in _EMA
    classy = content.get("classy_state_dict")
    return classy if isinstance(classy, Mapping) else content, False


def _flat(part: Mapping[Any, Any], prefix: str = "") -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for key, value in part.items():
        name = f"{prefix}{key}"
        if isinstance(value, Tensor):
            found[name] = value
        elif isinstance(value, Mapping) and not str(key).startswith("optim"):
            found |= _flat(value, f"{name}.")
    return found


def _unwrapped(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {".".join(part for part in n.split(".") if part not in _WRAPPERS): value for n, value in tensors.items()}


def _hints(content: Mapping[Any, Any]) -> dict[str, str]:
    config = content.get("config")
    if isinstance(config, Mapping) and isinstance(config.get("backbone"), str):
        hints = {"architecture": config["backbone"], "stem": str(config.get("stem", "imagenet"))}
        found = {key: config[key] for key in ("image_size", "mean", "std") if key in config}
        return hints | {key: str(list(v) if isinstance(v, tuple) else v) for key, v in found.items()}
    return {"architecture": content["arch"]} if isinstance(content.get("arch"), str) else {}
