"""Factory of data sets (by path) and loaders (by name).

Modules load lazily: DALI and FFCV are optional and heavy.
"""

import os
from collections.abc import Sequence
from typing import Literal, Unpack

from loaders.batch import Loader
from loaders.datasets.beton import is_beton
from loaders.datasets.dataset import ImageDataset, OnError, open_folder
from loaders.datasets.stored import open_stored
from loaders.pipeline.loader import LoaderOptions
from loaders.views.order import BatchOrder
from loaders.views.plan import ViewPlan

LoaderName = Literal["dali", "torch", "synthetic", "ffcv"]


def open_images(
    path: str | os.PathLike[str], labels: str | os.PathLike[str] | None = None, on_error: OnError = "stop",
    workers: int | None = None, *, classes: Sequence[str] | None = None
) -> ImageDataset:  # fmt: skip
    """Open images as a data set: a folder, or a ``.beton`` file.

    A folder is read by :func:`loaders.datasets.dataset.open_folder`. cocor-prep has verified what it stored in a
    ``.beton`` file, so ``on_error`` matters to folders only.
    """
    if is_beton(path):
        return open_stored(path, labels, classes=classes)
    return open_folder(path, labels, on_error, workers, classes=classes)


def open_loader(
    name: LoaderName, dataset: ImageDataset, plan: ViewPlan, order: BatchOrder, *, hw_decoder_load: float = 0.65,
    read_at_once: int | None = None, **options: Unpack[LoaderOptions]
) -> Loader:  # fmt: skip
    """Open a loader for ``dataset``, the views of ``plan``, the batches of ``order``.

    Every name gives the same images, labels, boxes and programs; pixels differ by decoder and resize only (synthetic
    ones are noise). ``options`` are those of :class:`loaders.pipeline.loader.PipelineLoader`. For ``dali``,
    ``hw_decoder_load`` is the share of JPEGs for the GPU's hardware decoder, ``read_at_once`` how many files are read
    at once. UserError if what is needed is not installed.
    """
    if name == "dali":
        from loaders.dali.loader import DaliLoader

        return DaliLoader(
            dataset, plan, order=order, hw_decoder_load=hw_decoder_load, read_at_once=read_at_once, **options
        )  # fmt: skip
    if name == "torch":
        from loaders.torch_loader import TorchLoader

        return TorchLoader(dataset, plan, order=order, **options)
    if name == "ffcv":
        from loaders.ffcv.loader import FfcvLoader

        return FfcvLoader(dataset, plan, order=order, **options)
    from loaders.synthetic import SyntheticLoader

    return SyntheticLoader(dataset, plan, order=order, **options)
