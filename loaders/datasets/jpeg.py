"""What a JPEG file says of itself: its size, and whether its pixels are all there."""

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


@jit
def _is_marker(data: NDArray[np.uint8], at: int, marker: int) -> bool:
    return at + 1 < len(data) and data[at] == 0xFF and data[at + 1] == marker


@jit
def pixels_complete(data: NDArray[np.uint8]) -> bool:
    """Whether the coded pixels of the JPEG file ``data`` (n,) hold just as many blocks as its header says.

    Decoders fill the rest of an image with grey, or lose its place, where bytes were changed, and most do not tell.
    Only baseline JPEGs with one scan are looked at; others count as complete. A change goes unseen if the changed codes
    make up the right number of blocks by chance. All is seen that libjpeg would warn of.
    """
    lookup = np.zeros((8, 1 << 16), np.uint16)  # of table and next 16 bits: symbol, and length << 8; 0 is no code
    blocks, tables = np.zeros(256, np.int64), np.zeros(256, np.int64)  # by component
    order = np.zeros(4, np.int64)
    height, width, widest, highest, interval, components = 0, 0, 1, 1, 0, 0
    at = 2
    while True:
        while at + 4 < len(data) and (data[at] != 0xFF or data[at + 1] == 0xFF or data[at + 1] == 0):
            at += 1
        if at + 4 >= len(data):
            return False
        marker, body = data[at + 1], at + 4
        end = at + 2 + int(data[at + 2]) * 256 + int(data[at + 3])
        if end > len(data) or body + 9 > len(data):
            return False
        if marker == 0xC4:
            while body + 17 <= end:
                table, symbol, code = (data[body] >> 4 & 1) * 4 + (data[body] & 3), body + 17, 0
                for length in range(1, 17):
                    for _ in range(data[body + length]):
                        if symbol >= end or code + (1 << (16 - length)) > 1 << 16:
                            return False
                        lookup[table, code : code + (1 << (16 - length))] = length << 8 | data[symbol]
                        code += 1 << (16 - length)
                        symbol += 1
                body = symbol
        elif marker == 0xC0 or marker == 0xC1:
            height = int(data[body + 1]) * 256 + int(data[body + 2])
            width = int(data[body + 3]) * 256 + int(data[body + 4])
            components = int(data[body + 5])
            if body + 6 + 3 * components > end:
                return False
            for part in range(body + 6, body + 6 + 3 * components, 3):
                across, down = int(data[part + 1]) >> 4, int(data[part + 1]) & 15
                blocks[data[part]] = across * down
                widest, highest = max(widest, across), max(highest, down)
        elif 0xC2 <= marker <= 0xCF and marker != 0xC8:
            return True
        elif marker == 0xDD:
            interval = int(data[body]) * 256 + int(data[body + 1])
        elif marker == 0xDA:
            break
        at = end
    if components == 0 or components > 4 or data[body] != components:
        return components > 0
    for place in range(components):
        order[place] = data[body + 1 + 2 * place]
        tables[order[place]] = data[body + 2 + 2 * place]
    if components == 1:  # its blocks are not grouped
        blocks[order[0]], widest, highest = 1, 1, 1
    count = -(-width // (8 * widest)) * -(-height // (8 * highest))
    at, bits, held, padding = (
        end,
        0,
        0,
        0,
    )  # next bits: the lowest ``held`` of ``bits``, ``padding`` last
    for group in range(count):
        if interval and group and group % interval == 0:
            if held - padding >= 8 or not _is_marker(data, at, 0xD0 + (group // interval - 1) % 8):
                return False
            at, bits, held, padding = at + 2, 0, 0, 0
        for place in range(components):
            component = order[place]
            first, others = tables[component] >> 4 & 3, 4 + (tables[component] & 3)
            for _ in range(blocks[component]):
                coefficient = 0
                while coefficient < 64:
                    while held < 32:
                        bits, held = bits << 8, held + 8
                        if at >= len(data) or (data[at] == 0xFF and not _is_marker(data, at, 0)):
                            padding += 8
                        else:
                            bits |= int(data[at])
                            at += 2 if data[at] == 0xFF else 1
                    found = int(lookup[others if coefficient else first, bits >> (held - 16)])
                    held -= (found >> 8) + (found & 15)
                    bits &= (1 << held) - 1
                    if found == 0 or held < padding:
                        return False
                    if coefficient and found & 0xFF == 0:  # the block's end
                        break
                    coefficient += (found >> 4 & 15) + 1 if coefficient else 1
                if coefficient > 64:
                    return False
    while _is_marker(data, at, 0xFF):
        at += 1
    return held - padding < 8 and _is_marker(data, at, 0xD9)
