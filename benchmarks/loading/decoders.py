"""Decoders of JPEG bytes in memory: the most that the cores can do, and what they do with Pillow.

libjpeg-turbo is called through FFCV's library, so that the FFCV loader is compared with the same decoder, or through
torchvision's if FFCV is not installed.
"""

from collections.abc import Callable, Sequence
from io import BytesIO
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torchvision.io import ImageReadMode, decode_jpeg

from loaders.errors import UserError

Decode = Callable[[bytes], object]


def pillow_decode(data: bytes) -> object:
    return Image.open(BytesIO(data)).convert("RGB")


def turbo_decoder() -> tuple[Decode, str]:
    """Return libjpeg-turbo with as little around it as possible, and its name, which says through which library."""
    try:
        from ffcv.libffcv import imdecode
    except ImportError:
        tensor = lambda data: torch.frombuffer(bytearray(data), dtype=torch.uint8)  # noqa: E731
        return lambda data: decode_jpeg(tensor(data), mode=ImageReadMode.RGB), "libjpeg-turbo through torchvision.io"
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

    return decode, "libjpeg-turbo through FFCV"


def decodable(decode: Decode, name: str, paths: Sequence[str]) -> tuple[list[bytes], str]:
    """Read the files that can be decoded, as failing takes no time, and note how many. UserError if there are none."""
    found = []
    for data in (Path(path).read_bytes() for path in paths):
        try:
            decode(data)
        except (ValueError, RuntimeError, OSError):
            continue
        found.append(data)
    if not found:
        raise UserError(f"{name} can decode none of the images")
    return found, name if len(found) == len(paths) else f"{name}, {len(found):,} of {len(paths):,} images"
