"""Parquet shards with embedded images, as data hubs publish them: a column of image files and one of class numbers.

The image column is a struct with the field "bytes" (and "path"), or plain binary. Class names are read from the
hub's notes in the file ("huggingface" metadata) where there are any.
"""

import json
from pathlib import Path
from typing import Any

from loaders.errors import UserError
from loaders.names import printable
from loaders.prep.locator import ParquetBytes
from loaders.prep.sources import Source, make_source, pad_numbers

_IMAGE_NAMES = ("image", "img", "jpg", "jpeg", "png")
_LABEL_NAMES = ("label", "labels", "fine_label", "cls", "class", "target")


def open_parquet(path: Path, shards: list[Path]) -> Source:
    """The images in ``shards``. Raises :class:`UserError` naming shard and column."""
    try:
        import pyarrow.parquet as parquet
    except ImportError as fault:
        raise UserError(f"{printable(path)}: reading parquet needs pyarrow: pip install pyarrow") from fault
    names: list[str] = []
    labels: list[Any] = []
    places: list[tuple[int, int, int]] = []  # shard, group, row
    image = label = None
    notes: dict[str, Any] = {}
    for number, shard in enumerate(shards):
        try:
            file = parquet.ParquetFile(shard)
        except Exception as fault:  # pyarrow raises many kinds on damaged files
            reason = str(fault).partition("\n")[0]
            raise UserError(f"{printable(shard)}: not a readable parquet file ({reason})") from fault
        with file:
            if image is None:
                image, label = _columns(shard, file.schema_arrow)
                notes = _notes(shard, file.schema_arrow)
            elif image not in file.schema_arrow.names or (label and label not in file.schema_arrow.names):
                raise UserError(f"{printable(shard)}: lacks the columns of {printable(shards[0])}; convert them apart")
            for group in range(file.num_row_groups):
                count = file.metadata.row_group(group).num_rows
                if label:
                    labels += _read_labels(shard, file, group, label)
                names += [f"{shard.stem}_{len(names) + row:08d}" for row in range(count)]
                places += [(number, group, row) for row in range(count)]
    if not names:
        raise UserError(f"{printable(path)}: holds no rows; check the path")
    found = _label_names(path, labels, _known_names(shards[0], notes, label)) if label else [None] * len(names)
    column = str(image)

    def locate(index: int) -> ParquetBytes:
        shard, group, row = places[index]
        return ParquetBytes(str(shards[shard].absolute()), column, group, row)

    return make_source(path, "parquet", names, found, [], locate)


def _notes(shard: Path, schema: Any) -> Any:
    """The hub's notes, JSON in the file's metadata."""
    try:
        return json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
    except (ValueError, RecursionError) as fault:
        raise UserError(f"{printable(shard)}: its 'huggingface' metadata is not JSON ({fault})") from fault


def _known_names(shard: Path, notes: Any, label: str) -> list[str] | None:
    """The class names in the notes, if there are any."""
    for key in ("info", "features", label, "names"):
        notes = notes.get(key) if isinstance(notes, dict) else None
    if notes is not None and not (isinstance(notes, list) and all(isinstance(name, str) for name in notes)):
        raise UserError(f"{printable(shard)}: the class names in its 'huggingface' metadata are no list of names")
    return notes


def _read_labels(shard: Path, file: Any, group: int, label: str) -> list[Any]:
    try:
        values: list[Any] = file.read_row_group(group, columns=[label]).column(label).to_pylist()
    except Exception as fault:  # as above
        reason = str(fault).partition("\n")[0]
        raise UserError(f"{printable(shard)}: its column {printable(label)} cannot be read ({reason})") from fault
    return values


def _columns(shard: Path, schema: Any) -> tuple[str, str | None]:
    """The image column and the label column."""
    import pyarrow

    def holds_files(kind: Any) -> bool:
        if pyarrow.types.is_struct(kind):
            return kind.get_field_index("bytes") >= 0
        return pyarrow.types.is_binary(kind) or pyarrow.types.is_large_binary(kind)

    images = [name for name in schema.names if holds_files(schema.field(name).type)]
    chosen = next((name for name in _IMAGE_NAMES if name in images), images[0] if len(images) == 1 else None)
    if chosen is None:
        raise UserError(
            f"{printable(shard)}: no column of image bytes named {', '.join(_IMAGE_NAMES)}; "
            f"it has {', '.join(schema.names)}"
        )
    return chosen, next((name for name in _LABEL_NAMES if name in schema.names), None)


def _label_names(path: Path, labels: list[Any], known: list[str] | None) -> list[str | None]:
    """The class name of every row; -1 in the file means no label, as on hubs' test splits."""
    values = [None if label == -1 else label for label in labels]
    strange = next((value for value in values if not isinstance(value, int | str | None)), None)
    if strange is not None:
        raise UserError(
            f"{printable(path)}: the label {strange!r} is neither a number nor text; keep one class an image"
        )
    if known is None:
        return pad_numbers([None if value is None else str(value) for value in values])
    beyond = next((value for value in values if value is not None and value not in range(len(known))), None)
    if beyond is not None:
        raise UserError(f"{printable(path)}: label {beyond!r} is not one of the {len(known)} classes it lists")
    return [None if value is None else known[value].replace("/", "_") for value in values]
