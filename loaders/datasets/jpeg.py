"""The size that a JPEG's own header states, for the decoders that would follow it wherever it leads."""

import numpy as np
from numpy.typing import NDArray

from loaders.jit import jit


@jit
def stated_size(data: NDArray[np.uint8]) -> tuple[int, int]:
    """(height, width) in the first frame header of the JPEG file ``data`` (n,); zeros if there is none.

    Markers are found as libjpeg finds them: bytes between two segments are stepped over.
    """
    at = 2
    while at + 9 < len(data):
        if data[at] != 0xFF or data[at + 1] == 0xFF or data[at + 1] == 0:
            at += 1
            continue
        marker = data[at + 1]
        if 0xC0 <= marker <= 0xCF and marker != 0xC4 and marker != 0xC8 and marker != 0xCC:
            return int(data[at + 5]) * 256 + int(data[at + 6]), int(data[at + 7]) * 256 + int(data[at + 8])
        if marker == 0xDA or marker == 0xD9:  # pixels, or the end, before a frame header
            return 0, 0
        if marker == 0x01 or 0xD0 <= marker <= 0xD8:  # without content
            at += 2
        else:
            at += 2 + int(data[at + 2]) * 256 + int(data[at + 3])
    return 0, 0
