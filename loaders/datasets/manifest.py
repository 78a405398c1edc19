"""Record of a prepared data set: its settings, classes and images.

One block of bytes, stored inside a ``.beton`` file or as the hidden file ``.cocor-prep`` of a prepared folder:

    magic line · JSON line · names joined by NUL · labels · sizes · CRC-32s · SHA-256 of everything before it
"""

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from loaders.errors import UserError
from loaders.text import printable, stays_inside

MAGIC = b"cocor-prep 1\n"
FOLDER_RECORD = ".cocor-prep"
_DIGEST = hashlib.sha256().digest_size


@dataclass(frozen=True, eq=False)
class Record:
    """Facts about N stored images.

    - ``names``: relative names with surrogate escapes; ``classes``; ``labels`` int64 (N,), -1 for none.
    - ``sizes`` int32 (N, 2): height and width of the stored, upright image.
    - ``crcs`` uint32 (N,): CRC-32 of the stored bytes.
    - ``facts``: settings, source digest and counts, as JSON holds them.
    """

    names: list[str]
    labels: npt.NDArray[np.int64]
    classes: list[str]
    sizes: npt.NDArray[np.int32]
    crcs: npt.NDArray[np.uint32]
    facts: dict[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.names)

    def to_bytes(self) -> bytes:
        """Return the block. Equal records give equal bytes."""
        names = b"\0".join(os.fsencode(name) for name in self.names)
        header = {"images": len(self), "name_bytes": len(names), "classes": self.classes, "facts": self.facts}
        arrays = (self.labels.astype("<i8"), self.sizes.astype("<i4"), self.crcs.astype("<u4"))
        body = MAGIC + json.dumps(header, sort_keys=True).encode() + b"\n" + names
        body += b"".join(array.tobytes() for array in arrays)
        return body + hashlib.sha256(body).digest()

    @classmethod
    def from_bytes(cls, block: bytes, where: str | os.PathLike[str]) -> "Record":
        """Read a block. UserError naming ``where`` if it is damaged or senseless."""
        body, digest = block[:-_DIGEST], block[-_DIGEST:]
        try:
            if not body.startswith(MAGIC) or hashlib.sha256(body).digest() != digest:
                raise ValueError("not as it was written")
            return cls._parse(body)._checked()
        except (ValueError, TypeError, KeyError, IndexError, OverflowError, RecursionError) as fault:
            raise UserError(
                f"{printable(where)}: the index of prepared data is damaged; run cocor-prep convert again"
            ) from fault

    @classmethod
    def _parse(cls, body: bytes) -> "Record":
        end = body.index(b"\n", len(MAGIC)) + 1
        header = json.loads(body[len(MAGIC) : end])
        count, names_end = header["images"], end + header["name_bytes"]
        names = [os.fsdecode(name) for name in body[end:names_end].split(b"\0")] if count else []
        labels = np.frombuffer(body, "<i8", count, names_end)
        sizes = np.frombuffer(body, "<i4", 2 * count, names_end + 8 * count).reshape(count, 2)
        crcs = np.frombuffer(body, "<u4", count, names_end + 16 * count)
        return cls(names, labels, header["classes"], sizes, crcs, header["facts"])

    def _checked(self) -> "Record":
        """Return the record. ValueError for contradictions and names that lead astray."""
        if not all(isinstance(name, str) for name in self.classes) or not isinstance(self.facts, dict):
            raise ValueError("classes or facts of the wrong type")
        for name in self.classes:
            os.fsencode(name)  # a ValueError for characters that no file name and no terminal takes
        if len(self.names) != len(self.labels) or not all(map(stays_inside, self.names)):
            raise ValueError("names that are too few or that would leave a folder")
        if len(self) and not -1 <= self.labels.min() <= self.labels.max() < len(self.classes):
            raise ValueError("labels without a class")
        return self


def read_folder_record(folder: Path) -> Record | None:
    """Read the record of a folder that cocor-prep made; None for any other folder."""
    place = folder / FOLDER_RECORD
    return Record.from_bytes(place.read_bytes(), place) if place.is_file() else None


def content_digest(
    names: Sequence[str], labels: npt.NDArray[np.int64], classes: Sequence[str], crcs: Sequence[int]
) -> str:
    """Digest names, classes and CRC-32s of images: equal wherever they come from."""
    lines = hashlib.sha256()
    for name, label, crc in zip(names, labels, crcs, strict=True):
        label_name = classes[label] if label >= 0 else ""
        lines.update(f"{crc:08x}".encode() + b"\0" + os.fsencode(label_name) + b"\0" + os.fsencode(name) + b"\0")
    return lines.hexdigest()
