"""Tars as sources, read in place: nothing is unpacked.

- ILSVRC's training tar: one tar a class inside the tar; or these tars, whose images are named after them, in a folder.
- Class folders in a tar, and flat tars (ILSVRC's validation tar) with or without a label file.
- WebDataset shards: ``key.jpg`` beside ``key.cls`` (or ``key.json`` with a "label"), in one or many tars.

:mod:`loaders.prep.tar_members` lists the members and refuses some of them by name.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from loaders.errors import UserError
from loaders.prep.byte_ranges import Stretch
from loaders.prep.source import Source, labels_from_list, make_source, pad_numbers
from loaders.prep.tar_members import list_tar
from loaders.text import IMAGE_SUFFIXES, printable

_IMAGES = frozenset(f".{suffix}" for suffix in IMAGE_SUFFIXES)
_CLASS_KEYS = ("label", "cls", "class", "class_id", "target")
_LARGEST_TEXT = 1 << 20


@dataclass
class _Members:
    """Files of one or more tars, in their order."""

    names: list[str] = field(default_factory=list)
    places: list[Stretch] = field(default_factory=list)
    faults: list[tuple[str, str]] = field(default_factory=list)


def open_tars(path: Path, shards: list[Path], labels: str | Path | None) -> Source:
    """The images in ``shards`` (the file ``path`` itself, or those of the folder ``path``)."""
    members = _Members()
    starts = []
    for shard in shards:
        starts.append(len(members.names))
        count = 0
        for name, place, fault in list_tar(shard):
            count += 1
            if fault:
                members.faults.append((f"{printable(shard.name)}:{printable(name)}", fault))
            else:
                members.names.append(name)
                members.places.append(place)
        if not count:
            raise UserError(f"{printable(shard)}: an empty tar; remove it or fetch it again")
        if all(name.startswith(f"{shard.stem}_") for name in members.names[starts[-1] :]):
            members.names[starts[-1] :] = [f"{shard.stem}/{name}" for name in members.names[starts[-1] :]]
    if labels is None and any(PurePosixPath(name).suffix in (".cls", ".json") for name in members.names):
        return _webdataset(path, shards, starts, members)
    return _plain(path, members, labels)


def _plain(path: Path, members: _Members, labels: str | Path | None) -> Source:
    names = _without_common_folders(members.names)
    faults = list(members.faults)
    if labels is not None:
        kept, label_of, strange = labels_from_list(labels, names)
        faults += strange
    else:
        label_of = [name.partition("/")[0] if "/" in name else None for name in names]
        kept = list(range(len(names)))
        if any(label is not None for label in label_of):
            faults += [(name, "outside every class folder") for name in names if "/" not in name]
            kept = [i for i in kept if label_of[i] is not None]
            label_of = [label_of[i] for i in kept]

    def locate(index: int) -> Stretch:
        return members.places[kept[index]]

    return make_source(path, "tar", [names[i] for i in kept], label_of, faults, locate)


def _without_common_folders(names: list[str]) -> list[str]:
    """``imagenet/train/n0/x.JPEG`` becomes ``n0/x.JPEG`` where all names begin alike."""
    while names and names[0].count("/") > 1:
        top = names[0].partition("/")[0] + "/"
        if not all(name.startswith(top) and name.count("/") > 1 for name in names):
            break
        names = [name.removeprefix(top) for name in names]
    return names


def _webdataset(path: Path, shards: list[Path], starts: list[int], members: _Members) -> Source:
    """Group members by shard and key (the name up to the first dot of its last part)."""
    names: list[str] = []
    labels: list[str | None] = []
    places: list[Stretch] = []
    faults = list(members.faults)
    for shard, start, end in zip(shards, starts, [*starts[1:], len(members.names)], strict=True):
        samples: dict[str, dict[str, Stretch]] = {}
        for name, place in zip(members.names[start:end], members.places[start:end], strict=True):
            folder, _, last = name.rpartition("/")
            key, dot, suffix = last.partition(".")
            samples.setdefault(f"{folder}/{key}" if folder else key, {})[dot + suffix.lower()] = place
        for key, parts in samples.items():
            image = next((suffix for suffix in parts if suffix in _IMAGES), None)
            label = _webdataset_class(shard, key, parts)
            if image is None or label is None:
                missing = "image" if image is None else "class (.cls, or .json with a label)"
                parts_there = ", ".join(sorted(parts))
                faults.append((f"{printable(shard.name)}:{printable(key)}", f"no {missing} beside {parts_there}"))
                continue
            names.append(f"{shard.stem}_{key}{image}")
            labels.append(label)
            places.append(parts[image])
    return make_source(path, "webdataset", names, pad_numbers(labels), faults, places.__getitem__)


def _webdataset_class(shard: Path, key: str, parts: dict[str, Stretch]) -> str | None:
    text = parts.get(".cls") or parts.get(".json")
    if text is None or not 0 < text.length <= _LARGEST_TEXT:
        return None
    content = text.read().decode("utf-8", "surrogateescape").strip()
    if ".cls" in parts:
        return content or None
    try:
        values = json.loads(content)
    except (ValueError, RecursionError) as fault:
        raise UserError(f"{printable(shard)}: {printable(key)}.json is not JSON ({fault})") from fault
    found = [values[name] for name in _CLASS_KEYS if name in values] if isinstance(values, dict) else []
    return str(found[0]) if found and isinstance(found[0], int | str) else None
