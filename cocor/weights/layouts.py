"""Find the encoder in a file of weights, and its model, by names and shapes.

    tensors by name -> prefix, below which an encoder begins -> usual names -> architecture and stem by the shapes

Prefixes of known programs come first, in the tables' order. Where none of them leads to a whole encoder, a known pair
of encoder and average within a wrapper does (``model.encoder_q.`` and ``model.encoder_k.``), and any other prefix that
leads to one, if it is the only one: between a student and its teacher the user must choose.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import takewhile

import timm
import torch
from torch import Tensor, nn

from cocor.backbone import build_backbone
from cocor.weights.files import WeightFile, Which
from loaders.errors import UserError

# Origin -> prefixes of the trained encoder, in the order of the search, and of its moving average. Names come without
# "module." and "_orig_mod.".
_PROGRAMS = {
    "MoCo": ("encoder_q.", "encoder_k."),
    "OpenSelfSup": ("encoder_q.0. online_net.0.", "encoder_k.0. target_net.0."),
    "BYOL": ("online_encoder.net. online_encoder.encoder. online_encoder. online_network.encoder. online_network. "
             "online_network_state_dict.encoder. online_net.", "target_encoder.net. target_encoder. "
             "target_network.encoder. target_network. target_network_state_dict.encoder. target_net."),
    "lightly": ("student_backbone.", "backbone_momentum. teacher_backbone."),
    "DINO": ("student.backbone.", "teacher.backbone."),
    "cocor": ("", "key_backbone."),
    "cocor, solo-learn, lightly, INTL or AugSelf": ("backbone.", ""),
    "SimSiam, SupCon or solo-learn": ("encoder.", ""),
    "solo-learn": ("", "momentum_backbone."),
    "VISSL": ("base_model.model.trunk._feature_blocks.", ""),
    "MoCo v3": ("base_encoder.", ""),
    "solo-learn or MoCo v3": ("", "momentum_encoder."),
    "a model wrapper": ("model. net.", ""),
}  # fmt: skip
_ONLINE, _EMA = ({p: origin for origin, row in _PROGRAMS.items() for p in row[at].split()} for at in (0, 1))
_ONLINE[""] = "timm or torchvision"
_HEAD = re.compile(r"(fc|head|classifier|linear|last_linear|projector|projection\w*|predict\w*|mlp)(\.|\d)")

# Blocks in layer1..4, and whether they are bottlenecks.
_RESNETS: dict[tuple[tuple[int, ...], bool], str] = {
    ((2, 2, 2, 2), False): "resnet18", ((3, 4, 6, 3), False): "resnet34", ((3, 4, 6, 3), True): "resnet50",
    ((3, 4, 23, 3), True): "resnet101", ((3, 8, 36, 3), True): "resnet152",
}  # fmt: skip
_FIRST = re.compile(r"(conv1|conv1\.0|stem\S*|patch_embed\.proj|features\.0\S*|conv_stem|0|f\.0)\.weight$")


class Models:
    """Models that weights are compared with, each built once; the user's word first."""

    def __init__(self, architecture: str | None, stem: str | None, image_size: int | None, channels: int) -> None:
        self.architecture, self.stem, self.image_size, self.channels = architecture, stem, image_size, channels
        self._built: dict[tuple[str, str], nn.Module] = {}

    def get(self, architecture: str, stem: str) -> nn.Module:
        """Return the model of this name and stem."""
        if (architecture, stem) not in self._built:
            self._built[architecture, stem] = build_backbone(architecture, stem, self.image_size, self.channels)
        return self._built[architecture, stem]

    def stem_of(self, architecture: str | None, seen: str) -> str:
        """Choose the stem that was named, else the one ``seen`` if the model can have it."""
        if self.stem is not None or architecture is None or seen == "imagenet":
            return self.stem or seen
        try:
            self.get(architecture, seen)
        except UserError:  # no ResNet, though its first convolution looks like a small stem's
            return "imagenet"
        return seen


@dataclass(frozen=True)
class Layout:
    """Tensors of an encoder, found below ``prefix``, by timm's names.

    ``architecture``: timm's name; None where neither the user, the file nor the shapes give one.
    """

    prefix: str
    origin: str
    tensors: dict[str, Tensor]
    architecture: str | None
    stem: str
    models: Models

    @property
    def model(self) -> nn.Module | None:
        """Build the model to fill; None if its architecture is not known."""
        return None if self.architecture is None else self.models.get(self.architecture, self.stem)

    @cached_property
    def fitting(self) -> list[str]:
        """List the names of the tensors that are the model's."""
        wanted = {} if self.model is None else self.model.state_dict()
        return [name for name, value in self.tensors.items() if name in wanted and value.shape == wanted[name].shape]

    @cached_property
    def missing(self) -> list[str]:
        """List the names of the model's tensors that are not there."""
        wanted = self.tensors if self.model is None else self.model.state_dict()
        own = set(self.fitting)
        return [n for n in wanted if n not in own and not n.endswith("num_batches_tracked")]

    @cached_property
    def strange(self) -> list[str]:
        """List the names of the other tensors, but for those of heads."""
        own = set(self.fitting)
        strange = [name for name in self.tensors if name not in own and not _HEAD.match(name)]
        # A bare file may hold anything beside the encoder, which begins no other encoder.
        return [n for n in strange if self.prefix or re.match(r"(layer|blocks|stages)", n)]

    @property
    def whole(self) -> bool:
        """Tell whether nothing is missing and nothing is left over."""
        return not self.missing and not self.strange


def recognise(file: WeightFile, which: Which, models: Models) -> Layout:
    """Find the encoder in ``file``: a whole one if any, else the most likely one.

    Raises:
        UserError: there is none, or there are two whole ones and their prefixes do not say which is the trained one.
    """
    found = _candidates(file, models)
    table = _ONLINE if which == "online" or file.averaged else _EMA
    known = next((replace(found[prefix], origin=table[prefix]) for prefix in table if prefix in found), None)
    if known is not None and known.whole:
        return known
    others = [layout for prefix, layout in found.items() if prefix and layout.architecture is not None]
    whole = _distinct(layout for layout in others if layout.whole)
    if known is None and (inside := _within(whole, which)) is not None:
        return inside
    if which == "ema" and not file.averaged:
        others = whole = []
    averages = [layout for layout in whole if layout.prefix in _EMA]
    if len(whole) == 1 and not averages:
        return whole[0]
    if known is not None:
        return known
    places = " and ".join(repr(layout.prefix) for layout in whole)
    if len(whole) > 1:
        raise UserError(f"{file.path}: whole encoders lie below {places}; save one of them to a file of its own")
    if averages:
        raise UserError(f"{file.path}: no encoder but a moving average of one, below {places}; use --which ema")
    if others:
        return max(others, key=lambda layout: (len(layout.fitting), len(layout.tensors)))
    groups = sorted({".".join(name.split(".")[:2]) for name in file.tensors})
    text = f"{', '.join(groups[:6])}{', ...' if len(groups) > 6 else ''}"
    kind = "encoder" if which == "online" else "moving average of an encoder (try --which online)"
    raise UserError(f"{file.path}: no {kind} among its {len(file.tensors)} weights ({text})")


def channels_of(file: WeightFile, architecture: str | None) -> int:
    """Return how many channels the images of its encoders have, 1 or 3.

    The layer that timm calls the first of ``architecture`` tells that, else the file's ``mean``, else the outermost
    layer with a first one's name: deeper ones may be depthwise, with one channel as well.
    """
    ends = tuple(f".{name}" for name in _first_of(architecture))
    outer = sorted((n for n, value in file.tensors.items() if value.ndim == 4), key=lambda n: (n.count("."), n))
    by_model = [file.tensors[name].shape[1] for name in outer if f".{name}".endswith(ends)]
    by_name = [file.tensors[name].shape[1] for name in outer if re.search(rf"(^|\.){_FIRST.pattern}", name)]
    seen = (*by_model[:1], len(file.of_pixels("mean")), *by_name[:1])
    return next((count for count in seen if count in (1, 3)), 3)


def _first_of(architecture: str | None) -> tuple[str, ...]:
    """Name the weights of the layers that timm calls the first ones of ``architecture``."""
    usual = None if architecture is None else timm.get_pretrained_cfg(architecture)
    first = (usual and usual.first_conv) or ()
    return tuple(f"{name}.weight" for name in ((first,) if isinstance(first, str) else first))


def _within(whole: list[Layout], which: Which) -> Layout | None:
    """Choose the wanted encoder of a known program within a wrapper: one is trained, all others are averages."""
    parts = [layout.prefix.split(".") for layout in whole]
    shared = takewhile(lambda names: len(set(names)) == 1, zip(*parts, strict=False))
    common = "".join(f"{names[0]}." for names in shared)
    inner = {layout.prefix.removeprefix(common): layout for layout in whole}
    online, averages = sorted(inner.keys() & _ONLINE), sorted(inner.keys() & _EMA)
    if len(online) != 1 or not averages or len(whole) != 1 + len(averages):
        return None
    wanted, table = (online, _ONLINE) if which == "online" else (averages, _EMA)
    return replace(inner[wanted[0]], origin=table[wanted[0]]) if len(wanted) == 1 else None


def _candidates(file: WeightFile, models: Models) -> dict[str, Layout]:
    """Return a layout for every prefix below which an encoder begins, the shortest prefix first."""
    starts = ((name, at) for name in file.tensors for at in (0, *(dot.end() for dot in re.finditer(r"\.", name))))
    found, first = {}, _first_of(models.architecture)
    prefixes = {n[:at] for n, at in starts if n[at:] in first or _FIRST.match(n[at:])}
    for prefix in sorted(prefixes, key=lambda one: (len(one), one)):
        below = {name.removeprefix(prefix): v for name, v in file.tensors.items() if name.startswith(prefix)}
        below = _conventional_names(below)
        guess, seen = _guess(below)
        architecture = models.architecture or guess
        about = architecture, models.stem_of(architecture, seen)
        found[prefix] = Layout(prefix, f"timm or torchvision, below {prefix!r}", below, *about, models)
    return found


def _distinct(layouts: Iterable[Layout]) -> list[Layout]:
    """Drop layouts that repeat the values of an earlier one, as where a program has a module under two names."""
    found: list[Layout] = []
    for one in layouts:
        same = (other for other in found if one.tensors.keys() == other.tensors.keys())
        if not any(all(torch.equal(one.tensors[name], v) for name, v in other.tensors.items()) for other in same):
            found.append(one)
    return found


def _conventional_names(found: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rename ResNets' weights as timm and torchvision do.

    Undoes children numbered in a Sequential (lightly) and ``shortcut`` for ``downsample`` (SupCon, lightly).
    """
    if "f.0.weight" in found:  # SimCLR re-implementations
        found = {name.removeprefix("f."): value for name, value in found.items()}
    numbers = sorted({int(head) for head in (name.partition(".")[0] for name in found) if head.isdecimal()})
    if numbers[:1] == [0]:
        parts = dict(zip(map(str, numbers), ("conv1", "bn1", "layer1", "layer2", "layer3", "layer4"), strict=False))
        found = {re.sub(r"^\d+(?=\.)", lambda m: parts.get(m[0], m[0]), name): v for name, v in found.items()}
    return {re.sub(r"^(layer\d\.\d+)\.shortcut\.", r"\1.downsample.", name): value for name, value in found.items()}


def _guess(found: dict[str, Tensor]) -> tuple[str | None, str]:
    """Return timm's name of the plain or wide ResNet with these shapes, if any, and the kind of its stem."""
    blocks = [(int(m[1]), int(m[2])) for m in (re.match(r"layer(\d)\.(\d+)\.", name) for name in found) if m]
    depth = tuple(max((block for layer, block in blocks if layer == at), default=-1) + 1 for at in (1, 2, 3, 4))
    bottleneck = "layer1.0.conv3.weight" in found
    name: str | None = _RESNETS.get((depth, bottleneck))
    stem = found.get("conv1.weight")
    if name and bottleneck:
        name = {64: name, 128: f"wide_{name}_2"}.get(found["layer1.0.conv1.weight"].shape[0])
    return name, "small" if stem is not None and stem.shape[2:] == (3, 3) else "imagenet"
