"""Read what a training run measured back from its metrics.jsonl.

    metrics.jsonl -> one checked record per line -> epochs of its steps, lengths of its composites

JSON's null stands for a number that was not finite; infinities and NaN from other programs become None as well.
"""

import json
import re
from pathlib import Path
from typing import Any

from cocor.run_dir import METRICS
from loaders.errors import UserError

Record = dict[str, Any]

_MEASURED = {"train": "images_per_s", "knn": "accuracy", "probe": "accuracy"}  # by kind, beside step and epoch
_BY_LENGTH = re.compile(r"([a-z]+)_(\d+)$")


def read_run(path: Path) -> list[Record]:
    """Read the records of a run's metrics.jsonl, without a last, half-written line.

    Raises:
        UserError: there are none, or one is damaged.
    """
    file = path if path.name == METRICS else path / METRICS
    try:
        lines = file.read_text(encoding="utf-8-sig").split("\n")
    except OSError as error:
        raise UserError(f"{file}: {error.strerror}; name the folder of a run") from None
    except UnicodeDecodeError:
        raise UserError(f"{file}: not a text file; name the folder of a run") from None
    numbered = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    records = []
    for number, line in numbered:
        try:
            records.append(_record(line))
        except (ValueError, TypeError, KeyError):
            if number != numbered[-1][0]:
                raise UserError(f"{file}:{number}: not a measurement in JSON") from None
    if not any(record["kind"] in _MEASURED for record in records):
        raise UserError(f"{file}: has no measurements yet")
    return records


def _record(line: str) -> Record:
    """Parse a line; ValueError, TypeError or KeyError if it is no measurement."""
    record: Record = json.loads(line, parse_constant=lambda _: None)
    measured = _MEASURED.get(record["kind"])
    if measured is not None and (missing := {"step", "epoch", measured} - record.keys()):
        raise KeyError(missing)
    return record


def epochs_of(records: list[Record]) -> list[float]:
    """Compute fractional epochs of training records from their steps."""
    counts = [r["step"] / r["epoch"] for r in records if r["kind"] == "knn" and r["epoch"] and r["step"]]
    train = [r for r in records if r["kind"] == "train"]
    per_epoch = counts[-1] if counts else train[-1]["step"] / (train[-1]["epoch"] + 1) if train else 1
    return [r["step"] / (per_epoch or 1) for r in train]


def lengths_of(records: list[Record], what: str = "similarity") -> list[int]:
    """Return the lengths of which a run measured ``what``; none for a plain method."""
    keys = {key for record in records if record["kind"] == "train" for key in record}
    return sorted(int(found[2]) for found in map(_BY_LENGTH.match, keys) if found and found[1] == what)
