"""Decoding alone, of JPEG bytes in memory: the most that the cores can do, and what they do with Pillow.

One process a core decodes whole images to RGB, over and over. libjpeg-turbo is called through FFCV's library, so that
the FFCV loader is compared with the same decoder, or through torchvision's if FFCV is not installed.
"""

import itertools
import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from loaders.errors import UserError

_REPORT = 32  # images between two reports
Decode = Callable[[bytes], object]


def pillow_decoder() -> tuple[Decode, str]:
    """Return Pillow's decoder and its name."""
    return lambda data: Image.open(BytesIO(data)).convert("RGB"), "Pillow"


def turbo_decoder() -> tuple[Decode, str]:
    """Return libjpeg-turbo with as little around it as possible, and its name, which says through which library."""
    try:
        return _ffcv_decoder(), "libjpeg-turbo through FFCV"
    except ImportError:
        return _torchvision_decoder(), "libjpeg-turbo through torchvision.io"


def _ffcv_decoder() -> Decode:
    from ffcv.libffcv import imdecode

    room = np.empty(1, np.uint8)

    def decode(data: bytes) -> object:
        nonlocal room
        width, height = Image.open(BytesIO(data)).size
        if len(room) < height * width * 3:
            room = np.empty(height * width * 3, np.uint8)
        pixels = room[: height * width * 3].reshape(height, width, 3)
        if imdecode(np.frombuffer(data, np.uint8), pixels, height, width, height, width):
            raise ValueError("libjpeg-turbo cannot decode this image")
        return pixels

    return decode


def _torchvision_decoder() -> Decode:
    import torch
    from torchvision.io import ImageReadMode, decode_jpeg

    return lambda data: decode_jpeg(torch.frombuffer(bytearray(data), dtype=torch.uint8), mode=ImageReadMode.RGB)


@contextmanager
def decoding(
    make: Callable[[], tuple[Decode, str]], paths: Sequence[str], workers: int
) -> Iterator[tuple[Iterator[int], str]]:
    """Yield an endless stream of counts of images that ``workers`` processes have just decoded, and a note on what
    decodes how many of the files. UserError if no file can be decoded."""
    decode, name = make()
    blobs = [data for path in paths if _can(decode, data := Path(path).read_bytes())]  # failing would take no time
    if not blobs:
        raise UserError(f"{name} can decode none of the images")
    note = name if len(blobs) == len(paths) else f"{name}, {len(blobs):,} of {len(paths):,} images"
    context: Any = multiprocessing.get_context("fork")  # the bytes are shared, not copied
    reports = context.SimpleQueue()
    processes = [
        context.Process(target=_decode_all, args=(make, blobs[n::workers] or blobs, reports), daemon=True)
        for n in range(workers)
    ]
    for process in processes:
        process.start()
    try:
        yield iter(reports.get, None), note
    finally:
        for process in processes:
            process.terminate()
            process.join()


def _can(decode: Decode, data: bytes) -> bool:
    try:
        decode(data)
    except (ValueError, RuntimeError, OSError):
        return False
    return True


def _decode_all(make: Callable[[], tuple[Decode, str]], blobs: Sequence[bytes], reports: Any) -> None:
    decode, _ = make()
    parent = os.getppid()
    for number, data in enumerate(itertools.cycle(blobs), start=1):
        decode(data)
        if number % _REPORT == 0:
            reports.put(_REPORT)
            if os.getppid() != parent:
                return
