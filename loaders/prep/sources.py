"""Open any form of images as one: folders, tars, parquet shards, ``.beton`` files.

An image of a class is named ``class/...``: a prepared set shows its images in the order that
:func:`loaders.datasets.dataset.open_folder` gives to class folders of these names.
"""

import os
from dataclasses import replace
from pathlib import Path

from loaders.datasets.beton import RAW, is_beton, open_beton
from loaders.datasets.dataset import open_folder
from loaders.datasets.folder import is_hidden
from loaders.datasets.manifest import FOLDER_RECORD
from loaders.datasets.size_index import CACHE_NAME
from loaders.errors import UserError
from loaders.prep.byte_ranges import ByteRange, FileBytes, Locator, RawPixels
from loaders.prep.parquet import open_parquet
from loaders.prep.source import Source, labels_from_list, make_source
from loaders.prep.tars import open_tars
from loaders.text import printable

_ACCEPTED = "a folder, .tar, .parquet or .beton"


def open_source(
    path: str | Path, labels: str | Path | None = None, *, workers: int | None = None, allow_empty: bool = False
) -> Source:
    """Recognise what ``path`` is and list its images, without reading pixels.

    ``labels`` is a label file for images without class folders; ``allow_empty`` accepts class folders without images.
    """
    place = Path(path)
    if not os.path.exists(place):  # noqa: PTH110 (a Path's own would raise where a folder on the way is locked)
        raise UserError(f"{printable(place)}: no such file or folder; check the path")
    if not place.is_dir() and not place.is_file():
        raise UserError(f"{printable(place)}: a pipe, socket or device; give {_ACCEPTED}")
    if is_beton(place):
        return _from_beton(place, labels)
    if place.is_dir():
        shards = shards_in(place)
        if not shards:
            return _from_folder(place, labels, workers, allow_empty)
    else:
        shards = [place]
    if shards[0].suffix == ".parquet":
        _refuse_labels(place, labels)
        return open_parquet(place, shards)
    if shards[0].suffix == ".tar":
        return open_tars(place, shards, labels)
    raise UserError(f"{printable(place)}: give {_ACCEPTED}; unpack a compressed tar first")


def _refuse_labels(path: Path, labels: str | Path | None) -> None:
    if labels is not None:
        raise UserError(f"--labels {printable(labels)}: {printable(path)} has its own labels; leave the flag out")


def shards_in(folder: Path) -> list[Path]:
    """List the tar or parquet shards in a folder or its ``data`` folder, in order.

    UserError where there are folders beside them, which may hold the same images, unpacked.
    """
    for place in (folder, folder / "data"):
        for pattern in ("*.tar", "*.parquet"):
            shards = sorted(shard for shard in place.glob(pattern) if shard.is_file() and shard.name[0] != ".")
            if not shards:
                continue
            folders = (entry.name for entry in place.iterdir() if entry.is_dir() and not is_hidden(entry.name))
            beside = next((name for name in folders if name != "data"), None)
            if beside is not None:
                raise UserError(
                    f"{printable(place)}: holds {printable(shards[0].name)} beside the folder {printable(beside)}; "
                    "move away what you do not mean"
                )
            return shards
    return []


def _from_folder(path: Path, labels: str | Path | None, workers: int | None, allow_empty: bool) -> Source:
    dataset = open_folder(path, labels, on_error="skip", workers=workers, allow_empty=allow_empty)
    root, names = str(path.absolute()), dataset.names
    label_of = [dataset.classes[label] if label >= 0 else None for label in dataset.labels]

    def locate(index: int) -> FileBytes:
        return FileBytes(f"{root}/{names[index]}")

    source = make_source(path, "folder", names, label_of, list(dataset.skipped), locate, dataset.classes)
    return replace(source, sizes=dataset.sizes, hidden=_count_hidden(path))


def _count_hidden(path: Path) -> int:
    """Count hidden names in a folder and its class folders, but for cocor's own."""
    own = {CACHE_NAME, FOLDER_RECORD}
    places = [path, *(entry for entry in path.iterdir() if entry.is_dir() and not is_hidden(entry.name))]
    return sum(is_hidden(name) and name not in own for place in places for name in os.listdir(place))  # noqa: PTH208 (names, not paths)


def _from_beton(path: Path, labels: str | Path | None) -> Source:
    file = open_beton(path)
    rows, faults = list(range(len(file))), list[tuple[str, str]]()
    label_of = [file.classes[label] if label >= 0 else None for label in file.labels]
    if labels is not None:
        if (file.labels >= 0).any():
            _refuse_labels(path, labels)
        rows, label_of, faults = labels_from_list(labels, file.names)
    place = str(path.absolute())
    pointers, lengths = file.table["data_ptr"], file.sizes_in_bytes

    def locate(index: int) -> Locator:
        row = rows[index]
        if file.table["mode"][row] == RAW:
            return RawPixels(place, int(pointers[row]), *file.sizes[row].tolist())
        return ByteRange(place, int(pointers[row]), int(lengths[row]))

    names = [file.names[row] for row in rows]
    source = make_source(path, "beton", names, label_of, faults, locate, file.classes)
    return replace(source, sizes=file.sizes[rows], in_order=labels is None)
