"""What tests of loaders share: opening some and closing all of them, and comparing their batches."""

import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from loaders.batch import IMAGENET_STD, Batch, Loader
from loaders.datasets.dataset import ImageDataset
from loaders.views.order import BatchOrder
from loaders.views.plan import ViewPlan

FIELDS = ("views", "original", "composites", "composition", "label", "index")


def opening(loaders: Mapping[str, Any], dataset: ImageDataset, plan: ViewPlan) -> Iterator[Callable[..., Loader]]:
    """For a fixture: opens a loader by name, in this process and with few threads; closes all of them at the end."""
    opened: list[Loader] = []

    def open_one(name: str, images: ImageDataset | None = None, plan: ViewPlan = plan, **order: object) -> Loader:
        images = images or dataset
        options: dict = {"batch_size": 8, "seed": plan.seed} | order
        workers = 0 if name == "torch" else 2
        opened.append(loaders[name](images, plan, order=BatchOrder(len(images), **options), workers=workers))
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
    """The names of those that the test has started."""
    return [thread.name for thread in threading.enumerate() if thread not in EARLIER]
