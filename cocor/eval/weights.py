"""An encoder from weights of any origin: who wrote the file is seen from its names, and nothing is loaded by halves.

    read_weights -> names -> layout (prefix, renaming) -> architecture by the shapes -> timm model, filled, in eval mode

Known are cocor's checkpoints and exports, timm, torchvision, MoCo, SimSiam, SupCon, BYOL, INTL, solo-learn, lightly and
VISSL. Every parameter and running statistic of the encoder must come from the file, and no weight below the prefix may
be left over but those of heads; else the load is refused with counts and names.
"""

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from cocor.build import build_backbone
from cocor.eval.weight_files import WeightFile, Which, read_weights
from loaders.errors import UserError

# (prefix, origin) of the trained encoder, and of its moving average. Names come without "module." and "_orig_mod.".
_ONLINE = (
    ("encoder_q.", "MoCo"),
    ("online_encoder.net.", "BYOL"),
    ("online_encoder.encoder.", "BYOL"),
    ("online_encoder.", "BYOL"),
    ("online_network.encoder.", "BYOL"),
    ("online_network.", "BYOL"),
    ("student_backbone.", "lightly"),
    ("student.backbone.", "DINO"),
    ("backbone.", "cocor, solo-learn, lightly, INTL or AugSelf"),
    ("encoder.", "SimSiam, SupCon or solo-learn"),
    ("base_model.model.trunk._feature_blocks.", "VISSL"),
    ("base_encoder.", "MoCo v3"),
    ("model.", "a model wrapper"),
    ("net.", "a model wrapper"),
    ("", "timm or torchvision"),
)
_EMA = (
    ("encoder_k.", "MoCo"),
    ("key_backbone.", "cocor"),
    ("target_encoder.net.", "BYOL"),
    ("target_encoder.", "BYOL"),
    ("target_network.encoder.", "BYOL"),
    ("target_network.", "BYOL"),
    ("momentum_backbone.", "solo-learn"),
    ("momentum_encoder.", "solo-learn or MoCo v3"),
    ("backbone_momentum.", "lightly"),
    ("teacher_backbone.", "lightly"),
    ("teacher.backbone.", "DINO"),
)
_HEAD = re.compile(r"(fc|head|classifier|linear|last_linear|projector|projection\w*|predict\w*|mlp)(\.|\d)")

# Blocks in layer1..4, and whether they are bottlenecks.
_RESNETS: dict[tuple[tuple[int, ...], bool], str] = {
    ((2, 2, 2, 2), False): "resnet18",
    ((3, 4, 6, 3), False): "resnet34",
    ((3, 4, 6, 3), True): "resnet50",
    ((3, 4, 23, 3), True): "resnet101",
    ((3, 8, 36, 3), True): "resnet152",
}


@dataclass(frozen=True)
class Encoder:
    """``backbone`` maps images (B, 3, H, W) to features (B, D). ``matched`` of its ``total`` tensors came from the
    file, whose ``unused`` tensors are heads and the like. ``image_size`` is the side of the crops that it was trained
    on, as far as is known. ``digest`` (SHA-256) is equal for equal encoders."""

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

    def describe(self) -> str:
        stem = "" if self.stem == "imagenet" else f", {self.stem} stem"
        counts = f"{self.matched} of {self.total} tensors loaded, {self.unused} of other parts left"
        return f"{self.name}: {self.architecture}{stem}, layout of {self.origin}; {counts}"


def load_encoder(
    weights: str | Path, *, which: Which = "online", architecture: str | None = None, stem: str | None = None
) -> Encoder:
    """The encoder in a file or in the folder of a run; ``timm:NAME`` is a pretrained model of timm's, ``random:NAME``
    an untrained one. ``architecture`` (timm's name) and ``stem`` override what the file says or its shapes show.

    Raises:
        UserError: nothing there, unsafe to open, or not fully the weights of such an encoder.
    """
    source, colon, model = str(weights).partition(":")
    if colon and source in ("timm", "random"):
        if not model:
            raise UserError(f"{source}: name a model of timm's behind it, such as {source}:resnet50")
        if which == "ema":
            raise UserError(f"--which ema: {source}:{model} has no moving average; leave the flag out")
        return _without_file(source, model, stem or "imagenet")
    file = read_weights(_file(Path(weights), which), which)
    prefix, origin, found = _recognise(file, which)
    found = _conventional_names(found)
    guess, guessed_stem = _guess(found)
    architecture = architecture or file.hints.get("architecture") or guess
    if architecture is None:
        raise UserError(
            f"{file.path}: the shapes of its {_few(list(found))} weights are no ResNet's that is known here; "
            "name the model with --backbone"
        )
    stem = stem or file.hints.get("stem") or guessed_stem
    size = _image_size(file.hints.get("image_size"), stem)
    backbone = build_backbone(architecture, stem, size if "image_size" in file.hints else None)
    matched = _fill(backbone, found, file.path, prefix, architecture)
    backbone.eval().requires_grad_(False)
    return Encoder(
        backbone,
        _short_name(file.path),
        "cocor" if "stem" in file.hints else origin,
        architecture,
        stem,
        size,
        matched,
        len(backbone.state_dict()),
        len(file.tensors) - matched,
        digest(backbone),
    )


def digest(module: nn.Module) -> str:
    """SHA-256 over the names and values of all parameters and buffers of ``module``."""
    found = hashlib.sha256()
    for name, value in sorted(module.state_dict().items()):
        data = value.detach().cpu().contiguous()
        found.update(f"{name} {data.dtype} {tuple(data.shape)}".encode())
        found.update(data.reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def _without_file(source: str, model: str, stem: str) -> Encoder:
    torch.manual_seed(0)
    backbone = build_backbone(model, stem)
    if source == "timm":
        import timm

        try:
            backbone = timm.create_model(model, pretrained=True, num_classes=0)
        except Exception as error:  # whatever the download runs into
            raise UserError(f"timm:{model}: its weights could not be had: {str(error).splitlines()[0][:160]}") from None
    backbone.eval().requires_grad_(False)
    total = len(backbone.state_dict())
    origin = "timm" if source == "timm" else "no training at all"
    name, size = f"{source}:{model}", _image_size(None, stem)
    return Encoder(backbone, name, origin, model, stem, size, total, total, 0, digest(backbone))


def _image_size(hint: str | None, stem: str) -> int:
    if hint is not None and hint.isdecimal() and len(hint) <= 4 and int(hint):
        return int(hint)
    return 32 if stem == "small" else 224


def _file(path: Path, which: Which) -> Path:
    """The file that ``path`` means: in a run's folder the export, or for the moving average the newest checkpoint."""
    if not path.is_dir():
        return path
    export = path / "backbone.safetensors"
    if which == "online" and export.is_file():
        return export
    checkpoints = sorted((path / "checkpoints").glob("step_*.pt"), key=lambda p: int(p.stem.partition("_")[2] or 0))
    if not checkpoints:
        raise UserError(f"{path}: holds neither backbone.safetensors nor checkpoints; name a file of weights")
    return checkpoints[-1]


def _short_name(path: Path) -> str:
    """The run's name for files that every run calls alike."""
    if path.name == "backbone.safetensors" and path.parent.name:
        return path.parent.name
    if path.parent.name == "checkpoints":
        return f"{path.parent.parent.name}/{path.stem}"
    return path.stem


def _recognise(file: WeightFile, which: Which) -> tuple[str, str, dict[str, Tensor]]:
    """Prefix, origin and the tensors below the prefix, without it: the first prefix below which an encoder begins."""
    for prefix, origin in _ONLINE if which == "online" or file.averaged else _EMA:
        below = {name.removeprefix(prefix): value for name, value in file.tensors.items() if name.startswith(prefix)}
        if _begins_encoder(below):
            return prefix, origin, below
    groups = sorted({".".join(name.split(".")[:2]) for name in file.tensors})
    text = f"{', '.join(groups[:6])}{', ...' if len(groups) > 6 else ''}"
    kind = "encoder" if which == "online" else "moving average of an encoder (try --which online)"
    raise UserError(f"{file.path}: no {kind} among its {len(file.tensors)} weights ({text})")


def _begins_encoder(names: Iterable[str]) -> bool:
    """Whether a ResNet's first convolution or a transformer's patch embedding stands at the top of these names."""
    first = re.compile(r"(conv1|conv1\.0|stem\S*|patch_embed\.proj|features\.0\S*|conv_stem|0|f\.0)\.weight$")
    return any(first.match(name) for name in names)


def _conventional_names(found: dict[str, Tensor]) -> dict[str, Tensor]:
    """torchvision's names, which are timm's, for the two common departures of ResNets: children numbered in a
    Sequential (lightly) and ``shortcut`` for ``downsample`` (CIFAR models such as SupCon's and lightly's)."""
    if "f.0.weight" in found:  # SimCLR re-implementations
        found = {name.removeprefix("f."): value for name, value in found.items()}
    numbers = sorted({int(name.partition(".")[0]) for name in found if name.partition(".")[0].isdecimal()})
    if numbers[:1] == [0]:
        parts = dict(zip(map(str, numbers), ("conv1", "bn1", "layer1", "layer2", "layer3", "layer4"), strict=False))
        found = {
            f"{parts.get(head, head)}.{rest}": value
            for (head, _, rest), value in zip((name.partition(".") for name in found), found.values(), strict=True)
        }
    return {re.sub(r"^(layer\d\.\d+)\.shortcut\.", r"\1.downsample.", name): value for name, value in found.items()}


def _guess(found: dict[str, Tensor]) -> tuple[str | None, str]:
    """timm's name of the plain or wide ResNet with these shapes, and the kind of its stem."""
    blocks = [(int(m[1]), int(m[2])) for m in (re.match(r"layer(\d)\.(\d+)\.", name) for name in found) if m]
    depth = tuple(max((block for layer, block in blocks if layer == at), default=-1) + 1 for at in (1, 2, 3, 4))
    bottleneck = "layer1.0.conv3.weight" in found
    name = _RESNETS.get((depth, bottleneck))
    stem = found.get("conv1.weight")
    kind = "small" if stem is not None and stem.shape[-1] == 3 else "imagenet"
    if name and bottleneck:
        width = found["layer1.0.conv1.weight"].shape[0]
        name = {64: name, 128: f"wide_{name}_2"}.get(width)
    return name, kind


def _fill(backbone: nn.Module, found: dict[str, Tensor], path: Path, prefix: str, architecture: str) -> int:
    """Load ``found`` into ``backbone``; the number of tensors that matched. UserError unless all do."""
    wanted = backbone.state_dict()
    fitting = {name: value for name, value in found.items() if name in wanted and value.shape == wanted[name].shape}
    missing = [name for name in wanted if name not in fitting and not name.endswith("num_batches_tracked")]
    strange = [name for name in found if name not in fitting and not _HEAD.match(name)]
    if prefix == "":  # a bare file may hold anything beside the encoder, which begins no other encoder
        strange = [name for name in strange if re.match(r"(layer|blocks|stages)", name)]
    other = [name for name in found if name in wanted and name not in fitting]
    if missing or strange:
        shapes = ""
        if other:
            has, needs = (tuple(part[other[0]].shape) for part in (found, wanted))
            shapes = f"of another shape: {_few(other)}, {has} instead of {needs} at first; "
        below = f" below {prefix!r}" if prefix else ""
        raise UserError(
            f"{path}: only {len(fitting)} of the {len(wanted)} tensors of {architecture} match{below}; "
            f"missing: {_few(missing)}; left over: {_few(strange)}; {shapes}"
            "name another model with --backbone or --stem"
        )
    broken = [name for name, value in fitting.items() if not value.isfinite().all()]
    if broken:
        raise UserError(f"{path}: {_few(broken)} of its weights are not finite; the training has failed")
    backbone.load_state_dict(fitting, strict=False)
    return len(fitting)


def _few(names: list[str]) -> str:
    return f"{len(names)} ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})" if names else "none"
