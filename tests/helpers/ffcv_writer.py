"""FFCV's own writer, which forks, in a process without threads whose locks a fork could copy."""

import multiprocessing
from pathlib import Path
from typing import Any

import numpy as np


def write_by_ffcv(path: Path, samples: list[tuple[Any, int]], mode: str, **image: Any) -> None:
    """Write ``samples`` of an image and a label to ``path``; ``image`` are options of FFCV's image field."""
    process = multiprocessing.get_context("spawn").Process(target=_write, args=(path, samples, mode, image))
    process.start()
    process.join(120)
    assert process.exitcode == 0


def _write(path: Path, samples: list[tuple[Any, int]], mode: str, image: dict[str, Any]) -> None:
    from loaders.ffcv.patches import load_ffcv

    load_ffcv()
    from ffcv.fields import IntField, RGBImageField
    from ffcv.writer import DatasetWriter

    np.random.seed(0)  # from which FFCV draws which images stay raw
    fields = {"image": RGBImageField(mode, **image), "label": IntField()}
    DatasetWriter(str(path), fields, num_workers=1).from_indexed_dataset(samples)
