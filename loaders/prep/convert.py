"""Convert any source to a ``.beton`` file or class folders, in one pass.

    source -> locators -> worker processes: read, decode, encode -> this process: write in order -> record -> rename

The output's bytes depend on the source alone, not on the number of workers or their speed.
"""

import os
from collections import Counter
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np

from loaders.datasets.dataset import OnError
from loaders.datasets.manifest import Record, content_digest
from loaders.errors import UserError
from loaders.prep.encode import Settings, encode
from loaders.prep.output import refuse_overlap, staged
from loaders.prep.pool import in_order
from loaders.prep.source import LONGEST_NAME, Source
from loaders.prep.writers import BetonWriter, FolderWriter
from loaders.text import printable

Target = Literal["beton", "folder"]
_ROW = np.dtype([("mode", "u1"), ("height", "i4"), ("width", "i4"), ("source_crc", "u4"), ("crc", "u4")])


@dataclass(frozen=True)
class Converted:
    """Counts of images by treatment, and (name, reason) of those left out."""

    images: int
    treatments: dict[str, int]
    skipped: list[tuple[str, str]]
    unlabelled: int


def convert(
    source: Source, output: Path, target: Target, settings: Settings, *,
    workers: int | None = None, on_error: OnError = "stop", force: bool = False,
) -> Converted:  # fmt: skip
    """Make ``output`` from ``source``, complete or not at all.

    ``on_error``: "stop" ends at the first unusable image (UserError), "skip" leaves such images out and lists them.
    """
    refuse_overlap(output, source.path)
    if source.faults and on_error == "stop":
        raise unusable(source, *source.faults[0])
    names = stored_names(source)
    faults = list(source.faults)
    with staged(output, folder=target == "folder", force=force) as work:
        writer = BetonWriter(work, len(source)) if target == "beton" else FolderWriter(work)
        images = in_order(
            partial(encode, settings=settings), source.locate, len(source), workers,
            name=source.origin, doing="converting",
        )  # fmt: skip
        with closing(writer), closing(images):
            rows = np.zeros(len(source), _ROW)
            kept: list[int] = []
            treatments: Counter[str] = Counter()
            for index, encoded in enumerate(images):
                if isinstance(encoded, str):
                    if on_error == "stop":
                        raise unusable(source, source.origin(index), encoded)
                    faults.append((source.origin(index), encoded))
                    continue
                writer.add(names[index], encoded.data)
                rows[len(kept)] = (encoded.mode, encoded.height, encoded.width, encoded.source_crc, encoded.crc)
                kept.append(index)
                treatments[encoded.treatment] += 1
            if not kept:
                raise UserError(f"{printable(source.path)}: no usable images; nothing was written")
            row_of = {index: row for row, index in enumerate(kept)}
            order = np.array([row_of[index] for index in source.order() if index in row_of], np.int64)
            chosen = np.array(kept, np.int64)[order]
            labels, crcs, rows = source.labels[chosen], rows["source_crc"][order].tolist(), rows[order]
            stored = [names[i] for i in chosen]
            done = Converted(
                len(kept), dict(sorted(treatments.items())), sorted(faults), unlabelled=int((labels < 0).sum())
            )
            digest = content_digest(stored, labels, source.classes, crcs)
            facts = {
                "target": target, "settings": asdict(settings),
                "source": {"name": printable(source.path.name), "kind": source.kind, "digest": digest},
                "images": done.images, "treatments": done.treatments,
                "skipped": [[printable(name), reason] for name, reason in done.skipped],
            }  # fmt: skip
            sizes = np.stack([rows["height"], rows["width"]], axis=1)
            record = Record(stored, labels, source.classes, sizes, rows["crc"], facts)
            writer.finish(order, rows["mode"], record)
    return done


def stored_names(source: Source) -> list[str]:
    """Return the names under which images are stored, ``.jpg`` added where needed."""
    longer = [name if name.lower().endswith((".jpg", ".jpeg")) else f"{name}.jpg" for name in source.names]
    fits = [len(os.fsencode(name.rpartition("/")[2])) <= LONGEST_NAME for name in longer]
    names = [new if room else old for new, old, room in zip(longer, source.names, fits, strict=True)]
    double = next((name for name, count in Counter(names).items() if count > 1), None)
    if double is not None:
        raise UserError(f"{printable(source.path)}: two images would both be stored as {printable(double)}; rename one")
    return names


def unusable(source: Source, name: str, reason: str) -> UserError:
    """Return the error that names an unusable image of ``source``."""
    where = printable(source.path / name) if source.kind == "folder" else f"{printable(source.path)}: {printable(name)}"
    return UserError(f"{where}: {reason}; remove it, or pass --on-error skip")
