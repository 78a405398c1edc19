"""What DALI's loader does for a batch before DALI gets it."""

import gc
import sys
from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loaders.dali.decoder import DaliDecoder
from loaders.dali.loader import DaliLoader
from loaders.datasets.dataset import open_folder
from loaders.datasets.stored import open_stored
from loaders.views.order import BatchOrder, CyclicOrder
from loaders.views.plan import ViewPlan


class Inline(Executor):
    """Does everything at once, in the thread that asks."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(fn(*args, **kwargs))
        return future


@pytest.mark.parametrize("form", ["folder", "beton"])
def test_no_python_runs_for_each_image(photo_folder: Path, photo_beton: Path, form: str) -> None:
    """Neither in the thread that makes requests nor in those that read files, as long as nothing is wrong."""
    few = open_folder(photo_folder, quiet=True) if form == "folder" else open_stored(photo_beton)
    images = few.subset(np.resize(np.arange(24), 600))
    counts, pool = [], Inline()
    for batch_size in (16, 64, 256):
        order = BatchOrder(600, batch_size)
        with closing(DaliLoader(images, ViewPlan(32), order=order, workers=2, read_at_once=8)) as loader:
            decoder = DaliDecoder(loader, loader._feed, 0.65, 8)
            for job in loader.jobs.epochs(range(1)):
                calls = 0

                def count(_frame: object, _event: str, _what: object) -> None:
                    nonlocal calls
                    calls += 1

                gc.disable()
                sys.setprofile(count)
                try:
                    request = loader._feed.finish(loader._feed.begin([job], pool, pool), pool, pool)
                    decoder._requests, decoder._pool = iter([request]), pool  # type: ignore[assignment]
                    decoder._next_inputs()
                finally:
                    sys.setprofile(None)
                    gc.enable()
            counts.append(calls)
    assert counts[0] == counts[1] == counts[2]


def test_files_read_at_once_change_nothing(photo_folder: Path) -> None:
    images = open_folder(photo_folder, quiet=True)
    found = []
    for read_at_once in (1, 3, 100):
        order = CyclicOrder(24, 5, steps=6, seed=1)
        with closing(DaliLoader(images, ViewPlan(32), order=order, workers=2, read_at_once=read_at_once)) as loader:
            found.append([batch.views.sum().item() for batch in loader.epoch(0)])
    assert found[0] == found[1] == found[2]
