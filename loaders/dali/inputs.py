"""Inputs of DALI: a batch's files side by side in one block, and its boxes.

Compiled code reads and judges the files (:mod:`loaders.datasets.file_reader`), so that DALI is given no file that would
crash it or keep it waiting, nor half an image, nor one of another size.

Some images are decoded on the host by :mod:`loaders.datasets.decode` and cropped there. DALI gets their crops side by
side as raw pixels (PPM) and passes them on unchanged:

- those whose pixels depend on the decoder: alpha, 16 bits, CMYK and the like;
- huge ones, one after the other, so that memory stays bounded on the host and on the GPU;
- those that DALI has failed to decode (:mod:`loaders.dali.recovery`);
- those whose files are not what they were when the data set was opened, or are not whole.
"""

import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor, Future
from contextlib import nullcontext
from dataclasses import dataclass
from threading import Lock

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from loaders.datasets.file_reader import CHANGED, GOOD, open_reader
from loaders.errors import UnusableImage
from loaders.pipeline.buffers import BufferPool
from loaders.pipeline.jobs import Job
from loaders.pipeline.loader import PipelineLoader
from loaders.text import printable
from loaders.torch_loader import resized_crop

HOST_PIXELS = 50_000_000
"""A larger image is decoded on the host, GPU or not: the GPU's decoder would need hundreds of megabytes for it."""

_SHOWN = 5  # names in a message
_UNSAFE = "DALI cannot decode it safely; decoded by Pillow from now on"
_CHANGED = "changed since the data set was opened, so decoded by Pillow from now on"
_log = logging.getLogger(__name__)
_one_decode = Lock()


@dataclass(frozen=True)
class Request:
    """Jobs of one or more steps, N images.

    - ``files``: uint8 (bytes,), the files side by side; int64 (N, 1), where each starts; int64 (N, 1), its length.
    - ``boxes`` float32 (N, C, 4): top, left, height, width; ``corners``: for each crop, begin and end (y, x) of its
      box, float32 (N, 2).
    - ``sizes`` int32 (N, 2): the height and width that DALI must find in each file.
    - ``on_host``: all of them were decoded on the host.

    DALI uses the memory of ``files`` and ``corners``, which must stay alive until it has.
    """

    jobs: list[Job]
    files: tuple[Tensor, Tensor, Tensor]
    boxes: NDArray[np.float32]
    corners: list[Tensor]
    sizes: NDArray[np.int32]
    on_host: bool

    @property
    def index(self) -> NDArray[np.int64]:
        return np.concatenate([job.planned.index for job in self.jobs])


@dataclass(frozen=True)
class Pending:
    """Request whose files are being read.

    The tasks ``reads`` set ``verdicts`` uint8 (M,) on the ``places`` int64 (M,) that DALI decodes. ``decodes`` are, by
    place, the tasks that decode the others on the host.
    """

    request: Request
    places: NDArray[np.int64]
    verdicts: NDArray[np.uint8]
    reads: Sequence[Future[None]]
    decodes: Mapping[int, Future[UnusableImage | None]]


class Feed:
    """Maker of requests from jobs.

    ``on_host`` bool (N,) are the images of the data set that DALI must not decode. ``read_at_once`` is into how many
    tasks the files of a request are divided.
    """

    def __init__(self, loader: PipelineLoader, read_at_once: int) -> None:
        self._loader, self._read_at_once = loader, read_at_once
        dataset, plan = loader.dataset, loader.plan
        self.pixels = dataset.sizes.astype(np.int64).prod(axis=1)
        huge = self.pixels > HOST_PIXELS
        self.on_host: NDArray[np.bool_] = ~dataset.plain | huge
        self._report(logging.INFO, f"decoded on the CPU, for more than {HOST_PIXELS:,} pixels", np.flatnonzero(huge))
        self._ppm = np.frombuffer(b"P6 %d %d 255\n" % (plan.layout.crops * plan.size, plan.size), np.uint8)
        self._memory = BufferPool()
        self._reader = open_reader(dataset)
        self._reader.read(*np.empty((2, 0), np.int64), *np.empty((2, 0), np.uint8))  # compiles it

    def request(self, jobs: list[Job], pool: Executor, on_host: bool = False) -> Request:
        """Make a request for ``jobs`` in the threads of ``pool``.

        All images are decoded ``on_host``, or as few as possible. Unusable images are skipped or raised, as the
        loader's ``on_error`` says.
        """
        return self.finish(self.begin(jobs, pool, pool, on_host), pool, pool)

    def renewed(self, request: Request, pool: Executor) -> Request:
        """Renew ``request`` without images that have turned out unusable meanwhile."""
        jobs = [self._loader.jobs.renewed(job) for job in request.jobs]
        same = all(new is old for new, old in zip(jobs, request.jobs, strict=True))
        return request if same else self.request(jobs, pool, request.on_host)

    def begin(self, jobs: list[Job], pool: Executor, readers: Executor, on_host: bool = False) -> Pending:
        """Begin a request: read in threads of ``readers``, decode in those of ``pool``."""
        jobs = [self._loader.jobs.renewed(job) for job in jobs]
        index = np.concatenate([job.planned.index for job in jobs])
        planned = np.concatenate([job.planned.boxes for job in jobs])
        host = self.on_host[index] | on_host
        lengths, sizes, boxes = self._reader.lengths[index], self._loader.dataset.sizes[index], planned.astype("f4")
        crops, size = boxes.shape[1], self._loader.plan.size
        boxes[host] = [(0, c * size, size, size) for c in range(crops)]
        sizes[host] = size, crops * size
        lengths[host] = len(self._ppm) + 3 * crops * size * size
        ends = np.cumsum(lengths)
        starts = ends - lengths
        block = self._memory.empty((int(lengths.sum()) or 1,), np.uint8)  # a rank may get no image
        memory = block.numpy()
        places = np.flatnonzero(~host)
        verdicts = np.empty(len(places), np.uint8)
        tasks = max(1, min(self._read_at_once, len(places)))
        shares = zip(*(np.array_split(part, tasks) for part in (index[places], starts[places], verdicts)), strict=True)
        reads = [readers.submit(self._reader.read, part, at, memory, out) for part, at, out in shares]
        decodes = {
            place: pool.submit(self._decode, int(index[place]), planned[place], memory[starts[place] : ends[place]])
            for place in np.flatnonzero(host).tolist()
        }
        files = block, torch.from_numpy(starts[:, None]), torch.from_numpy(lengths[:, None])
        begin, extent = torch.from_numpy(boxes).split(2, dim=-1)
        corners = torch.stack([begin, begin + extent]).permute(2, 0, 1, 3).contiguous()  # (C, 2, N, 2)
        request = Request(jobs, files, boxes, list(corners.flatten(0, 1)), sizes, on_host)
        return Pending(request, places, verdicts, reads, decodes)

    def finish(self, pending: Pending, pool: Executor, readers: Executor) -> Request:
        """Finish a request that was begun, once all of it is read.

        It is made again, in the same threads, without what has turned out unusable, and with images decoded on the host
        whose files DALI should not get.
        """
        refused: dict[int, int] = {}  # verdicts by image
        while True:
            for read in pending.reads:
                read.result()
            request, bad = pending.request, self._refused(pending)
            faults = {place: fault for place, task in pending.decodes.items() if (fault := task.result())}
            if not bad and not faults:
                break
            for place, fault in faults.items():
                self._loader.jobs.skip(int(request.index[place]), fault)
            self.on_host[list(bad)] = True
            refused |= bad
            pending = self.begin(request.jobs, pool, readers, request.on_host)
        if refused:
            used = set(request.index.tolist())
            changed = [i for i, verdict in refused.items() if verdict == CHANGED and i in used]
            self._report(logging.WARNING, _CHANGED, changed)
            self._report(logging.WARNING, _UNSAFE, sorted(used & refused.keys() - set(changed)))
        return request

    def encoded(self, index: int) -> NDArray[np.uint8]:
        """Read the file of one image as DALI gets it."""
        file, at = np.zeros(self._reader.lengths[index], np.uint8), np.zeros(1, np.int64)
        self._reader.read(at + index, at, file, np.empty(1, np.uint8))
        return file

    def close(self) -> None:
        """Give free memory back to the system."""
        self._memory.clear()

    def _refused(self, pending: Pending) -> dict[int, int]:
        """Return verdicts by image on files that DALI should not get."""
        bad = pending.verdicts != GOOD
        index = pending.request.index[pending.places[bad]]
        return dict(zip(index.tolist(), pending.verdicts[bad].tolist(), strict=True))

    def _decode(self, index: int, boxes: NDArray[np.int32], out: NDArray[np.uint8]) -> UnusableImage | None:
        """Decode an image and write the PPM file of its crops, side by side, to ``out``; or say why it is unusable."""
        dataset, plan = self._loader.dataset, self._loader.plan
        try:
            with _one_decode if self.pixels[index] > HOST_PIXELS else nullcontext():
                image = dataset.image(index).decode()
                crops = np.concatenate([resized_crop(image, box, plan.size, plan.filter) for box in boxes], axis=1)
        except UnusableImage as fault:
            return fault
        np.concatenate([self._ppm, crops.reshape(-1)], out=out)
        return None

    def _report(self, level: int, topic: str, index: Sequence[int] | NDArray[np.int64]) -> None:
        """Log ``topic`` with the names of the images ``index``, each once."""
        dataset = self._loader.dataset
        new = dataset.bad_samples.unreported(topic, [dataset.names[i] for i in index])
        if new:
            more = f" and {len(new) - _SHOWN:,} more" if len(new) > _SHOWN else ""
            _log.log(level, f"{topic}: {', '.join(map(printable, new[:_SHOWN]))}{more}")
