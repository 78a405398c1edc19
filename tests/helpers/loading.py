"""What tests of loaders share: opening some and closing all of them, and comparing their batches."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from loaders.batch import Batch, Loader
from loaders.channels import IMAGENET_STD
from loaders.datasets.dataset import ImageDataset, OnError
from loaders.open import open_loader
from loaders.views.order import BatchOrder
from loaders.views.plan import ViewPlan

OpenLoader = Callable[..., Loader]
FIELDS = ("views", "original", "composites", "composition", "label", "index")


NAMES: list[Any] = ["torch", "dali", pytest.param("ffcv", marks=pytest.mark.ffcv)]


def opening(
    folder: ImageDataset, stored: ImageDataset, plan: ViewPlan, on_error: OnError = "stop"
) -> Iterator[OpenLoader]:
    """For a fixture: opens a loader by name, in this process and with few threads; closes all of them at the end.

    Without ``images`` it shows ``folder``, or ``stored`` where it reads nothing else."""
    opened: list[Loader] = []

    def open_one(name: Any, images: ImageDataset | None = None, on_error: OnError = on_error, **options: Any) -> Loader:
        if name == "ffcv":
            pytest.importorskip("ffcv", reason="needs the ffcv extra", exc_type=ImportError)
        images = images or (stored if name == "ffcv" else folder)
        views = options.pop("plan", plan)
        kept = {key: options.pop(key) for key in ("device", "dtype", "workers") if key in options}
        order = options.pop("order", None) or BatchOrder(
            len(images), **({"batch_size": 8, "seed": views.seed} | options)
        )
        kept = {"workers": 0 if name == "torch" else 2, "on_error": on_error} | kept
        opened.append(open_loader(name, images, views, order, **kept))
        return opened[-1]

    yield open_one
    for loader in opened:
        loader.close()


def same(first: Batch, second: Batch) -> bool:
    return all(torch.equal(getattr(first, name), getattr(second, name)) for name in FIELDS)


def grey_levels(first: torch.Tensor, second: torch.Tensor) -> float:
    """Mean absolute difference in units of 1/255; tensors (..., 3, H, W)."""
    std = torch.tensor(IMAGENET_STD).view(3, 1, 1)
    return float(((first - second).abs() * std).mean() * 255)


EARLIER: set[threading.Thread] = set()  # what ran when the test began, see conftest: an earlier test's is not its fault


def threads() -> list[str]:
    """The names of those that the test has started and that do not end within a second."""
    for thread in (new := [thread for thread in threading.enumerate() if thread not in EARLIER]):
        thread.join(1.0)  # multiprocessing leaves those that feed its queues to end by themselves
    return [thread.name for thread in new if thread.is_alive()]
