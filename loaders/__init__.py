"""Data side of cocor: image bytes in, batches out. Knows nothing of learning.

Public are the names in ``__all__``, described in cocor/API.md and imported when they are first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from loaders.batch import Batch as Batch
    from loaders.batch import Loader as Loader
    from loaders.datasets.dataset import ImageDataset as ImageDataset
    from loaders.errors import UserError as UserError
    from loaders.open import open_images as open_images
    from loaders.open import open_loader as open_loader
    from loaders.views.ops import POOLS as POOLS
    from loaders.views.ops import Op as Op
    from loaders.views.order import BatchOrder as BatchOrder
    from loaders.views.plan import Augmentation as Augmentation
    from loaders.views.plan import ViewPlan as ViewPlan

__version__ = "0.1.0"

_HOMES = {
    "open_images": "open", "open_loader": "open", "ImageDataset": "datasets.dataset", "BatchOrder": "views.order",
    "ViewPlan": "views.plan", "Augmentation": "views.plan", "Op": "views.ops", "POOLS": "views.ops",
    "Batch": "batch", "Loader": "batch", "UserError": "errors",
}  # fmt: skip

__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
