"""FFCV's loader in a planned order, with a pipeline that ends in our threads.

    PlannedOrder -> FFCV's loader and reader -> LocateImages (a decoder, compiled by FFCV) -> SubmitImages -> crops

FFCV works on one batch at a time, into a ring of buffers. Here its last operation hands the batch to
:class:`loaders.ffcv.decoder.DecodePool`, with memory of the batch's own, and returns: no thread waits for the slowest
image of a batch, a batch stays valid as long as it is held, and numba's threading layers, which may abort a process in
which two loaders run at once, are not needed. An error inside FFCV's thread would leave its consumer waiting for ever,
so errors travel as values.

Import this module only after :func:`loaders.ffcv.patches.load_ffcv`.
"""

import queue
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
from ffcv.fields.rgb_image import SimpleRGBImageDecoder
from ffcv.loader import Loader, OrderOption
from ffcv.pipeline.operation import Operation
from ffcv.traversal_order.base import TraversalOrder
from numpy.typing import NDArray

from loaders.datasets.stored import StoredDataset
from loaders.ffcv.decoder import COLUMNS, HEIGHT, LENGTH, MODE, OFFSET, ROW, WIDTH, PendingCrops
from loaders.views.order import BatchOrder

Submit = Callable[[NDArray[np.uint64]], PendingCrops]  # from where a batch's images are stored, (B, COLUMNS)

_AHEAD = 1  # batches in FFCV's queue, beside one that waits for room in it and one that the consumer waits for
_PATIENCE_S = 1.0


class LocateImages(SimpleRGBImageDecoder):
    """Give, in place of pixels, where each image is stored: new uint64 (B, COLUMNS)."""

    def declare_state_and_memory(self, previous_state: Any) -> tuple[Any, None]:
        return replace(previous_state, jit_mode=True, shape=(COLUMNS,), dtype=np.dtype(np.uint64)), None

    def generate_code(self) -> Callable:
        read = self.memory_read

        def locate(batch_indices, _memory, metadata, storage_state):  # type: ignore[no-untyped-def]
            found = np.empty((len(batch_indices), COLUMNS), np.uint64)
            for i in range(len(batch_indices)):
                image = metadata[batch_indices[i]]
                found[i, OFFSET] = image["data_ptr"]
                found[i, LENGTH] = read(image["data_ptr"], storage_state).size
                found[i, MODE] = image["mode"]
                found[i, HEIGHT] = image["height"]
                found[i, WIDTH] = image["width"]
                found[i, ROW] = batch_indices[i]
            return found

        return locate


class SubmitImages(Operation):
    """Call ``submit`` with each located batch, until an error or :meth:`stop`."""

    def __init__(self) -> None:
        super().__init__()
        self._submit: Submit | None = None

    def start(self, submit: Submit) -> None:
        self._submit = submit

    def stop(self) -> None:
        self._submit = None

    def declare_state_and_memory(self, previous_state: Any) -> tuple[Any, None]:
        return replace(previous_state, jit_mode=False), None

    def generate_code(self) -> Callable:
        return self._run

    def _run(self, stored: NDArray[np.uint64], _memory: None) -> PendingCrops | BaseException:
        submit = self._submit
        if submit is None:
            raise StopIteration  # what FFCV's thread takes for the end of the epoch
        try:
            return submit(stored)
        except BaseException as fault:
            self.stop()
            return fault


class PlannedOrder(TraversalOrder):
    """The rows of the file that this rank sees in an epoch, from ``start_step`` on."""

    def __init__(self, loader: Any, order: BatchOrder, rows: NDArray[np.int64]) -> None:
        super().__init__(loader)
        self._order, self._rows = order, rows
        self.start_step = 0

    def sample_order(self, epoch: int) -> NDArray[np.int64]:
        steps = [self._order.indices(epoch, step) for step in range(self.start_step, self._order.steps)]
        return self._rows[np.concatenate([np.empty(0, np.int64), *steps])]


class PlannedLoader(Loader):
    """FFCV's loader over the images of ``dataset`` in the batches of ``order``."""

    def __init__(self, dataset: StoredDataset, order: BatchOrder) -> None:
        self._submit_images = SubmitImages()
        super().__init__(
            str(dataset.file.path),
            batch_size=order.local_batch_size,
            num_workers=1,  # of FFCV's own, which only locate
            os_cache=True,
            order=OrderOption.SEQUENTIAL,
            seed=0,  # drawn from numpy's global generator otherwise
            pipelines={"image": [LocateImages(), self._submit_images], "label": None},
            drop_last=False,
            batches_ahead=_AHEAD,
        )
        self.traversal_order = PlannedOrder(self, order, dataset.rows)
        for name in ("ptr_to_size", "sample_to_pages", "page_to_samples"):  # 450 bytes an image, for the other cache
            setattr(self.memory_manager, name, {})

    def batches(self, epoch: int, start_step: int, submit: Submit) -> Generator[PendingCrops, None, None]:
        """Yield ``submit``'s results in order. FFCV's thread ends with this."""
        self.next_epoch, self.traversal_order.start_step = epoch, start_step
        self.first_traversal_order = self.next_traversal_order()  # which FFCV takes its length from
        self._submit_images.start(submit)
        iterator = iter(self)
        try:
            for result in _results(iterator):
                if isinstance(result, BaseException):
                    raise result
                yield result
        finally:
            self._submit_images.stop()
            iterator.close()
            while iterator.is_alive():  # it may be waiting for room in the queue
                with suppress(queue.Empty):
                    iterator.output_queue.get(timeout=0.02)
            iterator.join()


def _results(iterator: Any) -> Iterator[PendingCrops | BaseException]:
    """Yield FFCV's results, without waiting for a thread that has died."""
    while True:
        alive = iterator.is_alive()
        try:
            item = iterator.output_queue.get(timeout=_PATIENCE_S)
        except queue.Empty:
            if alive:
                continue
            raise RuntimeError("FFCV's thread ended without a result") from None
        if item is None:
            return
        _, (result,) = item
        yield result
