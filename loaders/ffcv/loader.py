"""FFCV loader: decode every image of a prepared file once, to all its crops.

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

from loaders.datasets.dataset import ImageDataset
from loaders.datasets.stored import StoredDataset
from loaders.errors import UserError
from loaders.ffcv.patches import load_ffcv
from loaders.pipeline.jobs import Faults, Job
from loaders.pipeline.loader import LoaderOptions, PipelineLoader
from loaders.text import printable
from loaders.views.order import BatchOrder
from loaders.views.plan import ViewPlan


class FfcvLoader(PipelineLoader):
    """Batches of images of a ``.beton`` file, decoded by ``workers`` threads.

    UserError if FFCV or the GPU is missing, or if the images are not in a ``.beton`` file.
    """

    def __init__(
        self, dataset: ImageDataset, plan: ViewPlan, *, order: BatchOrder, **options: Unpack[LoaderOptions]
    ) -> None:
        if not isinstance(dataset, StoredDataset):
            raise UserError(
                f"{printable(dataset.root)}: --loader ffcv reads .beton files; make one with: "
                f"cocor-prep convert {printable(dataset.root)} NAME.beton"
            )
        if plan.filter != "bilinear":
            raise UserError(f"--loader ffcv resizes with a bilinear filter only, not {plan.filter}")
        load_ffcv()
        super().__init__(dataset, plan, order=order, **options)
        self._stored = dataset
        self._loader: Any = None

    def close(self) -> None:
        super().close()
        self._loader = None

    def crops(self, epochs: range, start_step: int) -> Generator[tuple[Job, Tensor], None, None]:
        from loaders.ffcv.decoder import ROW, DecodePool, PendingCrops, locate
        from loaders.ffcv.pipeline import PlannedLoader

        if self._loader is None:
            self._loader = PlannedLoader(self._stored, self.order)

        def submit(stored: NDArray[np.uint64]) -> PendingCrops:
            self.use_device()
            job = next(jobs)
            rows = self._stored.rows[job.planned.index]
            if not np.array_equal(rows, stored[:, ROW]):  # some images are known to be unusable
                stored = locate(self._stored.file, rows)
            self._stored.file.beton.read_ahead(rows)
            return pool.submit(job, stored, self.room(job))

        def mend(pending: PendingCrops) -> tuple[Job, Tensor]:
            def decode(job: Job, places: list[int]) -> Faults:
                stored = locate(self._stored.file, self._stored.rows[job.planned.index])
                return pool.submit(job, stored, pending.crops, places).wait()

            return self.jobs.mend(pending.job, pending.wait(), decode), pending.crops

        with (
            closing(DecodePool(self._stored.file, self.plan.size, max(1, self.workers))) as pool,
            closing(self.jobs.epochs(epochs, start_step)) as jobs,
        ):
            for epoch in epochs:
                first = start_step if epoch == epochs.start else 0
                with closing(self._loader.batches(epoch, first, submit)) as batches:
                    for batch in batches:
                        yield mend(batch)
