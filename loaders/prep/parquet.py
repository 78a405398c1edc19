"""Parquet shards with embedded images, as data hubs publish them.

The image column is a struct with the field "bytes", or plain binary; another one has class names or numbers, whose
names are read from the hub's notes in the file ("huggingface" metadata) where there are any.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from loaders.errors import UserError
from loaders.files import open_regular
from loaders.prep.byte_ranges import ParquetBytes
from loaders.prep.source import Source, make_source, pad_numbers
from loaders.text import printable

_IMAGE_NAMES = ("image", "img", "jpg", "jpeg", "png")
_LABEL_NAMES = ("label", "labels", "fine_label", "cls", "class", "target")


def open_parquet(path: Path, shards: list[Path]) -> Source:
    """List the images in ``shards``. UserError naming shard and column."""
    try:
        import pyarrow.parquet as parquet
    except ImportError as fault:
        raise UserError(f"{printable(path)}: reading parquet needs pyarrow: pip install pyarrow") from fault
    names, origins, labels = list[str](), list[str](), list[Any]()
    places: list[tuple[int, int, int]] = []  # shard, group, row
    image, label, known = "", None, None
    for number, shard in enumerate(shards):
        with _readable(shard), open_regular(shard, "a parquet file") as file, parquet.ParquetFile(file) as table:
            columns = table.schema_arrow
            if not number:
                image, label = _columns(shard, columns)
                known = _known_names(shard, columns, label)
            elif image not in columns.names or (label and label not in columns.names):
                raise UserError(f"{printable(shard)}: lacks the columns of {printable(shards[0])}; convert them apart")
            elif _known_names(shard, columns, label) != known:
                raise UserError(f"{printable(shard)}: other classes than in {printable(shards[0])}; convert them apart")
            start, room = len(names), os.fstat(file.fileno()).st_size
            for group in range(table.num_row_groups):
                count = table.metadata.row_group(group).num_rows
                if not 0 <= count <= room:  # an image takes a byte at least
                    raise ValueError(f"{count:,} rows in {room:,} bytes")
                if label:
                    found = table.read_row_group(group, columns=[label]).column(label).to_pylist()
                    if len(found) != count:
                        raise ValueError(f"{len(found):,} labels of {count:,} rows")
                    labels += found
                origins += [f"{shard.name}:row {len(names) - start + row}" for row in range(count)]
                names += [f"{shard.stem}_{len(names) + row:08d}" for row in range(count)]
                places += [(number, group, row) for row in range(count)]
    if not names:
        raise UserError(f"{printable(path)}: holds no rows; check the path")
    label_of = _label_names(path, labels, known) if label else [None] * len(names)
    null = {i for i, value in enumerate(labels) if value is None}
    null = null if len(null) < len(labels) else set()  # a set without any labels is unlabelled
    kept = [i for i in range(len(names)) if i not in null]

    def locate(index: int) -> ParquetBytes:
        shard, group, row = places[kept[index]]
        return ParquetBytes(str(shards[shard].absolute()), image, group, row)

    faults = [(origins[i], "no class: its label is null") for i in sorted(null)]
    names, origins = [names[i] for i in kept], [origins[i] for i in kept]
    return make_source(path, "parquet", names, [label_of[i] for i in kept], faults, locate, origins=origins)


@contextmanager
def _readable(shard: Path) -> Iterator[None]:
    """Turn any error in reading ``shard`` into one line that names it."""
    try:
        yield
    except UserError:
        raise
    except Exception as fault:  # pyarrow raises many kinds on damaged files
        reason = str(fault).partition("\n")[0]
        if "encrypt" in reason.lower() or "decrypt" in reason.lower():
            raise UserError(f"{printable(shard)}: an encrypted parquet file; decrypt it first ({reason})") from fault
        raise UserError(f"{printable(shard)}: not a readable parquet file ({reason}); fetch it again") from fault


def _known_names(shard: Path, schema: Any, label: str | None) -> list[str] | None:
    """Read class names from the hub's notes, JSON in the metadata; None without any."""
    if label is None:
        return None
    try:
        notes = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
    except (ValueError, RecursionError) as fault:
        what = f"its 'huggingface' metadata, which names the classes, is not JSON ({fault})"
        raise UserError(f"{printable(shard)}: {what}; fetch it again, or write it without that metadata") from fault
    for key in ("info", "features", label, "names"):
        notes = notes.get(key) if isinstance(notes, dict) else None
    if notes is not None and not (isinstance(notes, list) and all(isinstance(name, str) for name in notes)):
        raise UserError(f"{printable(shard)}: the class names in its 'huggingface' metadata are no list of names")
    return notes


def _columns(shard: Path, schema: Any) -> tuple[str, str | None]:
    """Find the image column and the label column."""
    import pyarrow

    def holds_files(kind: Any) -> bool:
        if pyarrow.types.is_struct(kind):
            return kind.get_field_index("bytes") >= 0
        return pyarrow.types.is_binary(kind) or pyarrow.types.is_large_binary(kind)

    names = [name for name in schema.names if schema.names.count(name) == 1]
    images = [name for name in names if holds_files(schema.field(name).type)]
    chosen = next((name for name in _IMAGE_NAMES if name in images), images[0] if len(images) == 1 else None)
    if chosen is None:
        raise UserError(
            f"{printable(shard)}: no column of image bytes named {', '.join(_IMAGE_NAMES)}; "
            f"it has {', '.join(map(printable, schema.names[:20])) or 'none'}"
        )
    return chosen, next((name for name in _LABEL_NAMES if name in names), None)


def _label_names(path: Path, labels: list[Any], known: list[str] | None) -> list[str | None]:
    """Return every row's class name; -1 means no label, as on hubs' test splits."""
    values = [None if label == -1 else label for label in labels]
    strange = next((value for value in values if not isinstance(value, int | str | None)), None)
    if strange is not None:
        what = f"the label {strange!r} is neither a number nor text"
        raise UserError(f"{printable(path)}: {what}; keep one class an image")
    if known is None:
        return pad_numbers([None if value is None else str(value) for value in values])
    beyond = next((value for value in values if value is not None and value not in range(len(known))), None)
    if beyond is not None:
        raise UserError(f"{printable(path)}: label {beyond!r} is not one of the {len(known)} classes it lists")
    return [None if value is None else known[value].replace("/", "_") for value in values]
