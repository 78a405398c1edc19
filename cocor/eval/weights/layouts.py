"""Finds the encoder in a file of weights, and its architecture, from names and shapes alone.

    tensors by name -> prefix, below which an encoder begins -> usual names -> architecture and stem by the shapes

Prefixes of known programs come first, in a fixed order. Where none of them leads to a whole encoder, a known pair of
encoder and average within a wrapper does (``model.encoder_q.`` and ``model.encoder_k.``), and any other prefix that
leads to one, if it is the only one: between a student and its teacher the user must choose.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import takewhile

import torch
from torch import Tensor, nn

from cocor.eval.weights.files import WeightFile, Which
from cocor.models import build_backbone
from loaders.errors import UserError

# (prefix, origin) of the trained encoder, and of its moving average. Names come without "module." and "_orig_mod.".
_ONLINE = (
    ("encoder_q.", "MoCo"),
    ("encoder_q.0.", "OpenSelfSup"),
    ("online_encoder.net.", "BYOL"),
    ("online_encoder.encoder.", "BYOL"),
    ("online_encoder.", "BYOL"),
    ("online_network.encoder.", "BYOL"),
    ("online_network.", "BYOL"),
    ("online_network_state_dict.encoder.", "BYOL"),
    ("online_net.0.", "OpenSelfSup"),
    ("online_net.", "BYOL"),
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
    ("encoder_k.0.", "OpenSelfSup"),
    ("key_backbone.", "cocor"),
    ("target_encoder.net.", "BYOL"),
    ("target_encoder.", "BYOL"),
    ("target_network.encoder.", "BYOL"),
    ("target_network.", "BYOL"),
    ("target_network_state_dict.encoder.", "BYOL"),
    ("target_net.0.", "OpenSelfSup"),
    ("target_net.", "BYOL"),
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

_FIRST = re.compile(r"(conv1|conv1\.0|stem\S*|patch_embed\.proj|features\.0\S*|conv_stem|0|f\.0)\.weight$")


@dataclass(frozen=True)
class Named:
    """What the user or the file says about the model, or None; ``image_size`` matters to transformers only."""

    architecture: str | None
    stem: str | None
    image_size: int | None


@dataclass(frozen=True)
class Layout:
    """``tensors`` of an encoder by timm's names, found below ``prefix``, as ``origin`` writes them. ``architecture`` is
    timm's name of it, None where neither the user, the file nor the shapes give one."""

    prefix: str
    origin: str
    tensors: dict[str, Tensor]
    architecture: str | None
    stem: str


@dataclass(frozen=True)
class Fit:
    """Names of a layout's tensors that are the model's, of the model's that it lacks, and of others that are no
    head's."""

    fitting: list[str]
    missing: list[str]
    strange: list[str]

    @property
    def whole(self) -> bool:
        """Whether nothing is missing and nothing is left over."""
        return not self.missing and not self.strange


class Models(dict[tuple[str, str, int | None], nn.Module]):
    """Models by architecture, stem and image size, each built once, on first use."""

    def __missing__(self, key: tuple[str, str, int | None]) -> nn.Module:
        self[key] = build_backbone(*key)
        return self[key]


def fit(model: nn.Module, layout: Layout) -> Fit:
    """How the tensors of ``layout`` match those of ``model``."""
    found, wanted = layout.tensors, model.state_dict()
    fitting = [name for name, value in found.items() if name in wanted and value.shape == wanted[name].shape]
    own = set(fitting)
    missing = [name for name in wanted if name not in own and not name.endswith("num_batches_tracked")]
    strange = [name for name in found if name not in own and not _HEAD.match(name)]
    if layout.prefix == "":  # a bare file may hold anything beside the encoder, which begins no other encoder
        strange = [name for name in strange if re.match(r"(layer|blocks|stages)", name)]
    return Fit(fitting, missing, strange)


def recognise(file: WeightFile, which: Which, named: Named, models: Models) -> Layout:
    """The layout of the encoder in ``file``: of a whole one if there is any, else of the most likely one. ``models``
    caches the models built for the comparison.

    Raises:
        UserError: there is none, or there are two whole ones and their prefixes do not say which is the trained one.
    """
    known = next(_known(file, which, named), None)
    if known is not None and _matches(known, named, models).whole:
        return known
    others = _elsewhere(file, named)
    whole = _distinct(layout for layout in others if _matches(layout, named, models).whole)
    inside = _within(whole, which)
    if known is None and inside is not None:
        return inside
    if which == "ema" and not file.averaged:
        others = whole = []
    averages = [layout for layout in whole if layout.prefix in dict(_EMA)]
    if len(whole) == 1 and not averages:
        return whole[0]
    if len(whole) > 1 and known is None:
        places = " and ".join(repr(layout.prefix) for layout in whole)
        raise UserError(f"{file.path}: whole encoders lie below {places}; save one of them to a file of its own")
    if known is None and averages:
        raise UserError(f"{file.path}: no encoder but a moving average of one, below {whole[0].prefix!r}; "
                        "use --which ema")  # fmt: skip
    best = max(others, key=lambda layout: len(_matches(layout, named, models).fitting), default=None)
    if known is None and best is not None and _matches(best, named, models).fitting:
        known = best
    if known is None:
        raise _no_encoder(file, which)
    return known


def _within(whole: list[Layout], which: Which) -> Layout | None:
    """Of several encoders, the wanted one of a known program that lies within a wrapper, as in ``model.encoder_q.`` and
    ``model.encoder_k.``: one is trained, and all others are averages."""
    parts = [layout.prefix.split(".") for layout in whole]
    shared = takewhile(lambda names: len(set(names)) == 1, zip(*parts, strict=False))
    common = "".join(f"{names[0]}." for names in shared)
    inner = {layout.prefix.removeprefix(common): layout for layout in whole}
    online, averages = (sorted(inner.keys() & dict(table)) for table in (_ONLINE, _EMA))
    if len(online) != 1 or not averages or len(whole) != 1 + len(averages):
        return None
    wanted = online if which == "online" else averages
    origin = dict(_ONLINE if which == "online" else _EMA)[wanted[0]]
    return replace(inner[wanted[0]], origin=origin) if len(wanted) == 1 else None


def _no_encoder(file: WeightFile, which: Which) -> UserError:
    groups = sorted({".".join(name.split(".")[:2]) for name in file.tensors})
    text = f"{', '.join(groups[:6])}{', ...' if len(groups) > 6 else ''}"
    kind = "encoder" if which == "online" else "moving average of an encoder (try --which online)"
    return UserError(f"{file.path}: no {kind} among its {len(file.tensors)} weights ({text})")


def _known(file: WeightFile, which: Which, named: Named) -> Iterator[Layout]:
    """Layouts of known programs below whose prefix an encoder begins."""
    for prefix, origin in _ONLINE if which == "online" or file.averaged else _EMA:
        below = _below(file, prefix)
        if any(map(_FIRST.match, below)):
            yield _layout(prefix, origin, below, named)


def _elsewhere(file: WeightFile, named: Named) -> list[Layout]:
    """Layouts of known models below any other prefix, the shortest first."""
    prefixes = set()
    for name in file.tensors:
        parts = name.split(".")
        prefixes |= {".".join(parts[:at]) + "." for at in range(1, len(parts)) if _FIRST.match(".".join(parts[at:]))}
    layouts = [
        _layout(prefix, f"timm or torchvision, below {prefix!r}", _below(file, prefix), named)
        for prefix in sorted(prefixes, key=lambda prefix: (len(prefix), prefix))
    ]
    return [layout for layout in layouts if layout.architecture is not None]


def _below(file: WeightFile, prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in file.tensors.items() if name.startswith(prefix)}


def _layout(prefix: str, origin: str, below: dict[str, Tensor], named: Named) -> Layout:
    found = _conventional_names(below)
    architecture, stem = _guess(found)
    return Layout(prefix, origin, found, named.architecture or architecture, named.stem or stem)


def _distinct(layouts: Iterable[Layout]) -> list[Layout]:
    """Without layouts that repeat the values of an earlier one, as where a program has a module under two names."""
    found: list[Layout] = []
    for layout in layouts:
        if not any(_equal(layout.tensors, other.tensors) for other in found):
            found.append(layout)
    return found


def _equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


def _matches(layout: Layout, named: Named, models: Models) -> Fit:
    if layout.architecture is None:
        return Fit([], list(layout.tensors), [])
    return fit(models[layout.architecture, layout.stem, named.image_size], layout)


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
    kind = "small" if stem is not None and stem.shape[1:] == (3, 3, 3) else "imagenet"
    if name and bottleneck:
        width = found["layer1.0.conv1.weight"].shape[0]
        name = {64: name, 128: f"wide_{name}_2"}.get(width)
    return name, kind
