"""The FFCV loader: one prepared file, every image decoded once, every crop of the plan cut from that decode.

    plan -> FFCV's loader finds a batch's bytes -> threads decode and resize -> crops, in pinned memory for a GPU

FFCV makes no random choices and keeps no random state: the order gives it the images, the jobs hold the boxes. See
:mod:`loaders.ffcv.pipeline` for FFCV's part in this and :mod:`loaders.ffcv.patches` for what it needs.
"""

from collections.abc import Generator
from contextlib import closing
from typing import Any, Unpack

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from loaders.batch import Batch
from loaders.datasets.dataset import ImageDataset
from loaders.datasets.stored import StoredDataset
from loaders.errors import UserError
from loaders.ffcv.patches import load_ffcv
from loaders.pipeline.delivery import Delivery, DeliveryOptions
from loaders.pipeline.jobs import Faults, Job
from loaders.text import printable
from loaders.views.order import BatchOrder
from loaders.views.plan import ViewPlan


class FfcvLoader:
    """Batches of ``dataset``, images of a ``.beton`` file, as ``plan`` and ``order`` say, on ``device``.

    ``workers`` threads decode. Other ``options``: :class:`DeliveryOptions`. UserError if FFCV or the GPU is missing, or
    if the images are not in a ``.beton`` file.
    """

    def __init__(
        self, dataset: ImageDataset, plan: ViewPlan, *, order: BatchOrder, **options: Unpack[DeliveryOptions]
    ) -> None:
        if not isinstance(dataset, StoredDataset):
            raise UserError(
                f"{printable(dataset.root)}: --loader ffcv reads .beton files; make one with: "
                f"cocor-prep convert {printable(dataset.root)} NAME.beton"
            )
        if plan.filter != "bilinear":
            raise UserError(f"--loader ffcv resizes with a bilinear filter only, not {plan.filter}")
        load_ffcv()
        self._delivery = Delivery(dataset, plan, order, **options)
        self._dataset = dataset
        self._loader: Any = None

    @property
    def steps_per_epoch(self) -> int:
        return self._delivery.order.steps

    def epoch(self, e: int, start_step: int = 0) -> Generator[Batch, None, None]:
        return self._delivery.deliver(self._pairs(e, start_step))

    def reading(self) -> list[str]:
        return self._delivery.reading()

    def close(self) -> None:
        self._delivery.close()
        self._loader = None

    def _pairs(self, epoch: int, start_step: int) -> Generator[tuple[Job, Tensor], None, None]:
        from loaders.ffcv.decoder import ROW, DecodePool, PendingCrops, locate
        from loaders.ffcv.pipeline import PlannedLoader

        delivery = self._delivery
        # Taken while the epoch is open: if a hung disk keeps it from ending, the next epoch makes a loader of its own.
        loader, self._loader = self._loader or PlannedLoader(self._dataset, delivery.order), None

        def submit(stored: NDArray[np.uint64]) -> PendingCrops:
            delivery.use_device()
            job = next(jobs)
            rows = self._dataset.rows[job.planned.index]
            if not np.array_equal(rows, stored[:, ROW]):  # some images are known to be unusable
                stored = locate(self._dataset.file, rows)
            return pool.submit(job, stored, delivery.room(job))

        def mend(pending: PendingCrops) -> tuple[Job, Tensor]:
            def decode(job: Job, places: list[int]) -> Faults:
                stored = locate(self._dataset.file, self._dataset.rows[job.planned.index])
                return pool.submit(job, stored, pending.crops, places).wait()

            return delivery.jobs.mend(pending.job, pending.wait(), decode), pending.crops

        try:
            with (
                closing(DecodePool(self._dataset.file, delivery.plan.size, max(1, delivery.workers))) as pool,
                closing(delivery.jobs.epoch(epoch, start_step)) as jobs,
                closing(loader.batches(epoch, start_step, submit)) as batches,
            ):
                for batch in batches:
                    yield mend(batch)
        finally:
            self._loader = loader
