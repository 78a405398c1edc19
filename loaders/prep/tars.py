"""Tars as sources, read in place.

- ILSVRC's training tar: one tar a class inside the tar; or these tars, whose images are named after them, in a folder.
- Class folders in a tar, and flat tars (ILSVRC's validation tar) with or without a label file.
- WebDataset shards: ``key.jpg`` beside ``key.cls`` (or ``key.json`` with a "label"), in one or many tars. Without any
  such class they are unlabelled, whatever captions lie beside the images.
"""

import json
import os
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, NamedTuple

from loaders.datasets.decode import describe
from loaders.datasets.folder import is_hidden
from loaders.datasets.layout import without_texts
from loaders.errors import UserError
from loaders.files import open_regular
from loaders.prep.byte_ranges import ByteRange
from loaders.prep.source import Source, labels_from_list, make_source, pad_numbers
from loaders.text import IMAGE_SUFFIXES, printable

_IMAGES = frozenset(f".{suffix}" for suffix in IMAGE_SUFFIXES)
_CLASS_KEYS = ("label", "cls", "class", "class_id", "target")
_LARGEST_TEXT = 1 << 20
_END = 2 * tarfile.BLOCKSIZE
_CHUNK = 1 << 20
_TWICE = "named twice in this shard; only the first is read"
_RULE = " (a key ends at the first dot of a name)"
_UNREADABLE = (tarfile.TarError, EOFError, ValueError, OverflowError, MemoryError)


@dataclass
class _Members:
    """Files of one or more tars, in their order."""

    names: list[str] = field(default_factory=list)
    places: list[ByteRange] = field(default_factory=list)
    faults: list[tuple[str, str]] = field(default_factory=list)


def open_tars(path: Path, shards: list[Path], labels: str | Path | None) -> Source:
    """List the images in ``shards``: the file ``path``, or those in that folder."""
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
    if labels is None and _is_webdataset(members.names):
        return _webdataset(path, shards, starts, members)
    return _plain(path, members, labels)


def _is_webdataset(names: list[str]) -> bool:
    """Tell whether there are classes or, without class folders, captions by the names of images."""
    if any(PurePosixPath(name).suffix == ".cls" for name in names):
        return True
    keys = {_key(name)[0] for name in names if PurePosixPath(name).suffix.lower() in _IMAGES}
    texts = (name for name in names if name.endswith(".json") or (name.endswith(".txt") and "/" not in name))
    return any(_key(name)[0] in keys for name in texts)


def _key(name: str) -> tuple[str, str]:
    """Split a name into a sample's key, up to the first dot of its last part, and what it is of that."""
    folder, slash, last = name.rpartition("/")
    key, dot, suffix = last.partition(".")
    return f"{folder}{slash}{key}", dot + suffix.lower()


def _plain(path: Path, members: _Members, labels: str | Path | None) -> Source:
    images = without_texts(path, members.names)
    places = [members.places[i] for i in images]
    inside = [members.names[i] for i in images]
    names = _without_common_folders(inside)
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

    def locate(index: int) -> ByteRange:
        return places[kept[index]]

    origins = [inside[i] for i in kept]
    return make_source(path, "tar", [names[i] for i in kept], label_of, faults, locate, origins=origins)


def _without_common_folders(names: list[str]) -> list[str]:
    """Shorten ``imagenet/train/n0/x.JPEG`` to ``n0/x.JPEG`` if all names begin alike."""
    while names and names[0].count("/") > 1:
        top = names[0].partition("/")[0] + "/"
        if not all(name.startswith(top) and name.count("/") > 1 for name in names):
            break
        names = [name.removeprefix(top) for name in names]
    return names


def _webdataset(path: Path, shards: list[Path], starts: list[int], members: _Members) -> Source:
    """Group members by shard and key (the name up to the first dot of its last part)."""
    names, origins, labels = list[str](), list[str](), list[str | None]()
    places: list[ByteRange] = []
    faults, unlabelled = list(members.faults), list[tuple[int, tuple[str, str]]]()
    for shard, start, end in zip(shards, starts, [*starts[1:], len(members.names)], strict=True):
        samples: dict[str, dict[str, int]] = {}
        for member in range(start, end):
            key, suffix = _key(members.names[member])
            parts = samples.setdefault(key, {})
            if suffix in parts:
                faults.append((f"{printable(shard.name)}:{printable(members.names[member])}", _TWICE))
            parts.setdefault(suffix, member)
        for key, parts in samples.items():
            image = next((suffix for suffix in parts if suffix in _IMAGES), None)
            text = parts.get(".cls", parts.get(".json"))
            label = None if text is None else _webdataset_class(shard, members.names[text], members.places[text])
            beside = f"beside {', '.join(sorted(parts))}{_RULE if any('.' in suffix[1:] for suffix in parts) else ''}"
            where = f"{printable(shard.name)}:{printable(key)}"
            if image is None:
                faults.append((where, f"no image {beside}"))
                continue
            if label is None:
                unlabelled.append((len(names), (where, f"no class (.cls, or .json with a label) {beside}")))
            names.append(f"{shard.stem}_{key}{image}")
            origins.append(f"{shard.name}:{members.names[parts[image]]}")
            labels.append(None if label == "-1" else label)  # no label, as in parquet shards
            places.append(members.places[parts[image]])
    bare = {i for i, _ in unlabelled} if len(unlabelled) < len(names) else set()  # a set without classes has no faults
    faults += [fault for i, fault in unlabelled if i in bare]
    kept = [i for i in range(len(names)) if i not in bare]

    def locate(index: int) -> ByteRange:
        return places[kept[index]]

    label_of, names, origins = [labels[i] for i in kept], [names[i] for i in kept], [origins[i] for i in kept]
    return make_source(path, "webdataset", names, pad_numbers(label_of), faults, locate, origins=origins)


def _webdataset_class(shard: Path, name: str, text: ByteRange) -> str | None:
    if not 0 < text.length <= _LARGEST_TEXT:
        return None
    content = text.read().decode("utf-8", "surrogateescape").strip()
    if name.lower().endswith(".cls"):
        return content or None
    try:
        values = json.loads(content)
    except (ValueError, RecursionError) as fault:
        raise UserError(f"{printable(shard)}: {printable(name)} is not JSON ({fault})") from fault
    found = [values[name] for name in _CLASS_KEYS if name in values] if isinstance(values, dict) else []
    return str(found[0]) if found and isinstance(found[0], int | str) else None


class Member(NamedTuple):
    """Visible file; ``fault`` says why it must not be used ("" for nothing)."""

    name: str
    place: ByteRange
    fault: str


def list_tar(shard: Path) -> Iterator[Member]:
    """Yield the visible members in order; a tar within is opened and names a folder.

    UserError naming ``shard``, and the tar within it, if one cannot be read to its end.
    """
    with open_regular(shard, "an uncompressed tar") as file:
        path, size = str(shard.absolute()), file.seek(0, os.SEEK_END)
        for member in _members(file, path, 0, size, printable(shard)):
            if member.fault or not member.name.endswith(".tar"):
                yield member
                continue
            folder, inside = member.name.removesuffix(".tar"), member.place
            where = f"{printable(shard)}: {printable(member.name)} in it"
            count = 0
            for inner in _members(file, path, inside.offset, inside.length, where):
                count += 1
                yield inner._replace(name=f"{folder}/{inner.name}")
            if not count:
                raise UserError(f"{where}: an empty tar; fetch it again")


def _members(file: BinaryIO, path: str, start: int, size: int, where: str) -> Iterator[Member]:
    """Yield the visible members of the tar in ``size`` bytes from ``start`` on."""
    window: Any = _Window(file, start, size)
    try:
        with tarfile.open(fileobj=window, mode="r:") as tar:
            for member in _forwards(tar):
                parts = member.name.split("/")
                if member.isdir() or any(is_hidden(part) for part in parts if part not in (".", "..")):
                    continue
                place = ByteRange(path, start + member.offset_data, member.size)
                yield Member(member.name.removeprefix("./"), place, _fault(member))
            _check_end(window, tar.offset, where)
    except _UNREADABLE as fault:
        why = f"not a readable, uncompressed tar ({describe(fault)})"
        raise UserError(f"{where}: {why}; fetch or unpack it again") from fault


def _forwards(tar: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """Yield the members of a tar, refusing those that lead back."""
    for member in tar:
        if member.size < 0 or tar.offset <= member.offset:
            raise ValueError("a member of negative size")
        tar.members.clear()  # type: ignore[attr-defined]  # it keeps them all, a kilobyte each
        yield member


def _check_end(file: Any, end: int, where: str) -> None:
    """Check that a tar ends with two blocks of zeros and nothing else behind them."""
    file.seek(end)
    closing = file.read(_END)
    if any(closing):
        raise UserError(f"{where}: damaged or cut after {end:,} bytes; fetch it again")
    if len(closing) < _END:
        raise UserError(f"{where}: the end of this tar is missing; fetch it again")
    while chunk := file.read(_CHUNK):
        if chunk.count(0) != len(chunk):
            raise UserError(f"{where}: goes on behind its end, like two tars in one file; keep them apart")


def _fault(member: tarfile.TarInfo) -> str:
    path = PurePosixPath(member.name)
    if path.is_absolute() or ".." in path.parts or "\0" in member.name:
        return "would leave the target folder"
    if not member.isreg():
        return "a link or device, not a file"
    if member.issparse():
        return "a sparse file, whose bytes do not lie together"
    return ""


class _Window:
    """``size`` bytes of ``file`` from ``start`` on, as a file of its own."""

    def __init__(self, file: BinaryIO, start: int, size: int) -> None:
        self._file, self._start, self._size, self._at = file, start, size, 0

    def tell(self) -> int:
        return self._at

    def seek(self, at: int) -> int:
        if at < 0:
            raise ValueError("a place before its beginning")
        self._at = at
        return at

    def read(self, count: int) -> bytes:
        room = max(0, min(count, self._size - self._at))
        data = os.pread(self._file.fileno(), room, self._start + self._at)
        self._at += len(data)
        return data
