"""Decoding threads: each JPEG of a ``.beton`` once, to all crops of the plan.

They use the libjpeg-turbo that FFCV is linked to, through decompressors of their own: FFCV's decoders drop the return
code, so that a damaged image shows half of itself or of its neighbour; its binding never frees the decompressors of a
thread; and its fast inverse transform differs from Pillow's. Where the code is not success, be it for damage or as a
harmless warning, :mod:`loaders.datasets.decode` decides, as for the other loaders.

Import this module only after :func:`loaders.ffcv.patches.load_ffcv`.
"""

import ctypes
import queue
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from ffcv.libffcv import lib
from numba import njit
from numpy.typing import NDArray
from torch import Tensor

from loaders.datasets.beton import RAW
from loaders.datasets.file_reader import jpeg_orientation
from loaders.datasets.stored import StoredFile
from loaders.errors import UnusableImage
from loaders.kernels.resize import resize_crops
from loaders.pipeline.jobs import Job

OFFSET, LENGTH, MODE, HEIGHT, WIDTH, ROW, COLUMNS = range(7)  # of the table that says where images are stored

_CHUNKS_A_THREAD = 4
_KEPT_BYTES = 64 << 20  # pixels of a larger image are not kept
_RGB = 0  # TJPF_RGB

_pointer, _int = ctypes.c_void_p, ctypes.c_int
_init, _destroy = lib.tjInitDecompress, lib.tjDestroy
_init.argtypes, _init.restype = [], _pointer
_destroy.argtypes, _destroy.restype = [_pointer], _int
_decompress = lib.tjDecompress2
_decompress.argtypes = [_pointer, _pointer, ctypes.c_ulong, _pointer, *[_int] * 5]
_decompress.restype = _int


def locate(file: StoredFile, rows: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Find where the images ``rows`` of ``file`` are stored: uint64 (B, COLUMNS)."""
    table = file.beton.table[rows]
    found = np.empty((len(rows), COLUMNS), np.uint64)
    columns = [table[name] for name in ("data_ptr", "mode", "height", "width")]
    for column, values in zip((OFFSET, MODE, HEIGHT, WIDTH), columns, strict=True):
        found[:, column] = values
    found[:, LENGTH], found[:, ROW] = file.beton.sizes_in_bytes[rows], rows
    return found


@dataclass(frozen=True)
class PendingCrops:
    """A batch that is being decoded into ``crops`` uint8 (B, C, S, S, 3)."""

    job: Job
    crops: Tensor
    parts: Sequence[Future[dict[int, UnusableImage]]]

    def wait(self) -> dict[int, UnusableImage]:
        """Wait for the crops. Returns the faults by place; crops there are undefined."""
        return {place: fault for part in self.parts for place, fault in sorted(part.result().items())}


class _Decoder:
    """Decompressor of one thread, with memory for the pixels of an image."""

    def __init__(self) -> None:
        handle = _init()
        if handle is None:
            raise MemoryError("libjpeg-turbo could not make a decompressor")
        self.handle = int(handle)
        self._pixels = np.empty(0, np.uint8)

    def pixels(self, count: int) -> NDArray[np.uint8]:
        if self._pixels.size >= count:
            return self._pixels
        pixels = np.empty(count, np.uint8)
        if count <= _KEPT_BYTES:
            self._pixels = pixels
        return pixels

    def close(self) -> None:
        _destroy(self.handle)


class DecodePool:
    """Threads that decode images of ``file`` to crops of ``size`` x ``size``."""

    def __init__(self, file: StoredFile, size: int, threads: int) -> None:
        self._file, self._size = file, size
        self._bytes = np.frombuffer(file.beton.data, np.uint8)
        self._chunks = threads * _CHUNKS_A_THREAD
        self._decoders = [_Decoder() for _ in range(threads)]
        self._free: queue.SimpleQueue[_Decoder] = queue.SimpleQueue()
        for decoder in self._decoders:
            self._free.put(decoder)
        self._pool = ThreadPoolExecutor(threads, "cocor-decode")

    def submit(
        self, job: Job, stored: NDArray[np.uint64], crops: Tensor, places: Sequence[int] | slice = slice(None)
    ) -> PendingCrops:
        """Start to decode the batch of ``job``, or some ``places`` of it, into ``crops``.

        ``stored`` (B, COLUMNS) says where its images are. Tasks get equal shares of bytes, since these decide how long
        decoding takes.
        """
        chosen = np.arange(len(stored))[places]
        order = chosen[np.argsort(stored[chosen, LENGTH])[::-1]]
        parts = [order[i :: self._chunks] for i in range(min(self._chunks, len(order)))]
        out = crops.numpy()
        return PendingCrops(job, crops, [self._pool.submit(self._decode, part, job, stored, out) for part in parts])

    def close(self) -> None:
        """Drop what has not been started and end the threads."""
        self._pool.shutdown(cancel_futures=True)
        for decoder in self._decoders:
            decoder.close()
        self._decoders = []

    def _decode(
        self, places: NDArray[np.int64], job: Job, stored: NDArray[np.uint64], out: NDArray[np.uint8]
    ) -> dict[int, UnusableImage]:
        damage = self._file.damage(stored[places, ROW].astype(np.int64))
        faults = {int(place): damage[row] for place in places if (row := int(stored[place, ROW])) in damage}
        places = places[[int(place) not in faults for place in places]] if faults else places
        boxes = job.planned.boxes
        codes = np.zeros(len(places), np.int32)
        decoder = self._free.get()
        try:
            room = int((stored[places, HEIGHT] * stored[places, WIDTH]).max(initial=0)) * 3
            decode_crops(
                places, stored, self._bytes, boxes, self._size, decoder.handle, decoder.pixels(room), out, codes
            )  # fmt: skip
        finally:
            self._free.put(decoder)
        for place in places[codes != 0]:
            try:
                self._decode_by_reference(int(stored[place, ROW]), boxes[place], out[place])
            except UnusableImage as fault:
                faults[int(place)] = fault
        return faults

    def _decode_by_reference(self, row: int, boxes: NDArray[np.int32], out: NDArray[np.uint8]) -> None:
        pixels = np.asarray(self._file.decode(row))
        height, width, _ = pixels.shape
        resize_crops(pixels.reshape(-1), height, width, boxes, self._size, out)


@njit(nogil=True)
def decode_crops(
    places: NDArray[np.int64], stored: NDArray[np.uint64], data: NDArray[np.uint8], boxes: NDArray[np.int32],
    size: int, handle: int, pixels: NDArray[np.uint8], out: NDArray[np.uint8], codes: NDArray[np.int32]
) -> None:  # fmt: skip
    """Decode the images at ``places`` of a batch, and resize their boxes into ``out``.

    ``stored`` (B, COLUMNS) says where they are in ``data``; ``pixels`` has room for any of them. ``codes`` becomes 1
    for all but plain JPEGs of the stored size that EXIF or XMP leave upright, as libjpeg-turbo turns none, and where it
    reports an error or a warning. Not cached: it holds addresses.
    """
    for i in range(len(places)):
        place = places[i]
        offset, length = stored[place, OFFSET], stored[place, LENGTH]
        height, width = np.int64(stored[place, HEIGHT]), np.int64(stored[place, WIDTH])
        image = data[offset : offset + length]
        if stored[place, MODE] != RAW:
            codes[i] = jpeg_orientation(image, int(height), int(width)) != 1 or _decompress(
                handle, image.ctypes.data, length, pixels.ctypes.data, width, 0, height, _RGB, 0
            )
            if codes[i]:
                continue
            image = pixels
        resize_crops(image, int(height), int(width), boxes[place], size, out[place])
