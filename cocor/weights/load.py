"""Load an encoder from weights of any origin, whole or not at all.

    read_weights -> names -> layout (prefix, renaming) -> architecture by the shapes -> timm model, filled, in eval mode

Known are the programs of :mod:`cocor.weights.layouts`, these within a wrapper of one's own, and any other prefix
below which, and nowhere else, a whole encoder lies. Every parameter and running statistic of the encoder must come from
the file, and no weight below the prefix may be left over but those of heads; else counts and names are reported.
"""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import timm
import torch
from torch import nn

from cocor.backbone import build_backbone
from cocor.run_dir import step_of
from cocor.weights.files import Which, read_weights
from cocor.weights.layouts import Layout, Models, channels_of, recognise
from loaders.channels import GREY_MEAN, GREY_STD, IMAGENET_MEAN, IMAGENET_STD
from loaders.errors import UserError


@dataclass(frozen=True)
class Encoder:
    """Frozen backbone, images (B, C, H, W) -> features (B, D), and its origin.

    ``image_size``: side in pixels of the crops that it was trained on, if known, else the usual one. ``matched`` of its
    ``total`` tensors came from the file, whose ``unused`` tensors are heads and the like. Equal encoders have equal
    ``digest`` (SHA-256). ``file`` is what was read, None for timm's and untrained ones. ``mean`` and ``std`` are
    those of pixels in [0, 1] that normalise its images, a value for each of their channels.
    """

    backbone: nn.Module
    name: str
    origin: str
    architecture: str
    stem: str
    image_size: int
    matched: int
    total: int
    unused: int
    digest: str
    file: Path | None = None
    mean: tuple[float, ...] = IMAGENET_MEAN
    std: tuple[float, ...] = IMAGENET_STD

    @property
    def channels(self) -> int:
        return len(self.mean)

    def describe(self) -> str:
        """Describe it in a line."""
        stem = "" if self.stem == "imagenet" else f", {self.stem} stem"
        counts = f"{self.matched} of {self.total} tensors loaded, {self.unused} of other parts left"
        return f"{self.name}: {self.architecture}{stem}, layout of {self.origin}; {counts}"


def load_encoder(
    weights: str | Path, *, which: Which = "online", architecture: str | None = None, stem: str | None = None,
    mean: Sequence[float] | None = None, std: Sequence[float] | None = None, in_chans: int = 3,
) -> Encoder:  # fmt: skip
    """Load the encoder of a file, a run's folder, ``timm:NAME`` or ``random:NAME``.

    ``architecture`` (timm's name) and ``stem`` override what the file says or its shapes show, ``mean`` and ``std`` the
    normalisation of its images that a run's file or timm tells, else ImageNet's. ``in_chans`` are the channels of
    ``timm:NAME`` and ``random:NAME``.

    Raises:
        UserError: nothing there, unsafe to open, or not fully the weights of such an encoder.
    """
    found = _load(weights, which, architecture, stem, in_chans)
    own: dict[str, Any] = normalisation(found.channels, mean, std)
    return replace(found, **own)


def normalisation(
    channels: int, mean: Sequence[float] | None, std: Sequence[float] | None
) -> dict[str, tuple[float, ...]]:  # fmt: skip
    """Return which of ``mean`` and ``std`` the user gives, a value a channel.

    Raises:
        UserError: for another number of channels.
    """
    given = {key: tuple(v) for key, v in (("mean", mean), ("std", std)) if v is not None}
    for key, values in given.items():
        if len(values) not in (1, channels):
            raise UserError(f"--{key}: {len(values)} values for {channels} channels; give as many, or one")
    return {key: values * (channels // len(values)) for key, values in given.items()}


def _load(
    weights: str | Path, which: Which, architecture: str | None, stem: str | None, in_chans: int
) -> Encoder:  # fmt: skip
    source, colon, model = str(weights).partition(":")
    if colon and source in ("timm", "random"):
        if not model:
            raise UserError(f"{source}: name a model of timm's behind it, such as {source}:resnet50")
        if which == "ema":
            raise UserError(f"--which ema: {source}:{model} has no moving average; leave the flag out")
        return _without_file(source, model, stem or "imagenet", in_chans)
    file = read_weights(_file(Path(weights), which), which)
    hints = file.hints
    if architecture is not None and architecture != hints.get("architecture", architecture):
        hints = {}  # of another model than the user's
    architecture, stem = architecture or hints.get("architecture"), stem or hints.get("stem")
    hint = hints.get("image_size")
    size = None if hint is None else _image_size(hint, architecture, stem or "imagenet")
    channels = channels_of(file, architecture)
    layout = recognise(file, which, Models(architecture, stem, size, channels))
    if layout.architecture is None or layout.model is None:
        raise UserError(f"{file.path}: the shapes of its {_few(list(layout.tensors))} weights are no ResNet's that is "
                        "known here; name the model with --backbone")  # fmt: skip
    _fill(layout.model, layout, file.path)
    origin = "cocor" if "stem" in file.hints else layout.origin
    size = size or _image_size(None, layout.architecture, layout.stem)
    found = _encoder(layout.model, _short_name(file.path), origin, layout.architecture, layout.stem, size)
    matched = len(layout.fitting)
    usual = {"mean": GREY_MEAN, "std": GREY_STD} if channels == 1 else {"mean": IMAGENET_MEAN, "std": IMAGENET_STD}
    told: dict[str, Any] = {key: values for key in usual if len(values := file.of_pixels(key)) == channels}
    unused = len(file.tensors) - matched
    return replace(found, matched=matched, unused=unused, file=file.path, **usual | told)


def _encoder(backbone: nn.Module, name: str, origin: str, architecture: str, stem: str, image_size: int) -> Encoder:
    backbone.eval().requires_grad_(False)
    total = len(backbone.state_dict())
    return Encoder(backbone, name, origin, architecture, stem, image_size, total, total, 0, digest(backbone))


def digest(module: nn.Module) -> str:
    """Compute the SHA-256 over names and values of all parameters and buffers."""
    found = hashlib.sha256()
    for name, value in sorted(module.state_dict().items()):
        data = value.detach().cpu().contiguous()
        found.update(f"{name} {data.dtype} {tuple(data.shape)}".encode())
        found.update(data.reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def _without_file(source: str, model: str, stem: str, in_chans: int) -> Encoder:
    torch.manual_seed(0)
    backbone = build_backbone(model, stem, in_chans=in_chans)
    if source == "timm":
        try:
            backbone = timm.create_model(model, pretrained=True, num_classes=0, in_chans=in_chans)
        except Exception as error:  # whatever the download runs into; a time-out has no text
            reason = (str(error) or type(error).__name__).splitlines()[0][:160]
            raise UserError(f"timm:{model}: its weights could not be had: {reason}") from None
    origin = "timm" if source == "timm" else "no training at all"
    found = _encoder(backbone, f"{source}:{model}", origin, model, stem, _image_size(None, model, stem))
    usual: Any = backbone.pretrained_cfg if source == "timm" else {"mean": IMAGENET_MEAN, "std": IMAGENET_STD}
    mean, std = (tuple(usual[key]) if in_chans == 3 else (round(fmean(usual[key]), 4),) for key in ("mean", "std"))
    return replace(found, mean=mean, std=std)


def _image_size(hint: str | None, architecture: str | None, stem: str) -> int:
    """Return the side in pixels that a file's ``hint`` tells, else the model's only one, or the protocols'."""
    if hint is not None and hint.isdecimal() and len(hint) <= 4 and int(hint):
        return int(hint)
    usual = None if architecture is None else timm.get_pretrained_cfg(architecture)
    if usual is not None and usual.fixed_input_size:
        return int(usual.input_size[-1])
    return 32 if stem == "small" else 224


def _file(path: Path, which: Which) -> Path:
    """Return the file that ``path`` means: in a run's folder the export or, for averages, the newest checkpoint."""
    if not path.is_dir():
        return path
    for export in (path / "backbone.safetensors", path / "model.safetensors"):  # of a run, of cocor-export --to hub
        if which == "online" and export.is_file():
            return export
    newest = max((path / "checkpoints").glob("step_*.pt"), key=step_of, default=None)
    if newest is None:
        raise UserError(f"{path}: holds neither backbone.safetensors nor checkpoints; name a file of weights")
    return newest


def _short_name(path: Path) -> str:
    """Return a name for reports: the run's where every run's file has the same name, else the file's."""
    if path.name in ("backbone.safetensors", "model.safetensors") and path.parent.name:
        return path.parent.name
    if path.parent.name == "checkpoints":
        return f"{path.parent.parent.name}/{path.stem}"
    return re.sub(r"\.(pth|pt|ckpt)$", "", path.stem) if path.suffix == ".tar" else path.stem


def _fill(backbone: nn.Module, layout: Layout, path: Path) -> None:
    """Load the tensors of ``layout`` into ``backbone``. Raise UserError unless they fit as a whole."""
    wanted, found = backbone.state_dict(), layout.tensors
    fitting = {name: found[name] for name in layout.fitting}
    other = [name for name in found if name in wanted and name not in fitting]
    if not layout.whole:
        shapes = ""
        if other:
            has, needs = (tuple(part[other[0]].shape) for part in (found, wanted))
            shapes = f"of another shape: {_few(other)}, {has} instead of {needs} at first; "
        below = f" below {layout.prefix!r}" if layout.prefix else ""
        counts = f"only {len(fitting)} of the {len(wanted)} tensors of {layout.architecture} match{below}"
        raise UserError(f"{path}: {counts}; missing: {_few(layout.missing)}; left over: {_few(layout.strange)}; "
                        f"{shapes}name another model with --backbone or --stem")  # fmt: skip
    broken = [name for name, value in fitting.items() if not value.isfinite().all()]
    if broken:
        raise UserError(f"{path}: {_few(broken)} of its weights are not finite; the training has failed")
    backbone.load_state_dict(fitting, strict=False)


def _few(names: list[str]) -> str:
    return f"{len(names)} ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})" if names else "none"
