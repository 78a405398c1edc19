"""Do all loaders show the same? A folder and the file made of it, by every loader, on 1, 2 and 4 ranks, by batches.

    python benchmarks/prep_agreement.py --data FOLDER

Converts class folders of images to a .beton file and runs an epoch of the paper's recipe with ``torch`` on the folder
(the reference) and with ``torch``, ``dali`` and ``ffcv`` on the file, side by side. Order, labels and compositions must
be equal, and the ranks together must show every image once. Originals may differ only by decoder and resize, views (of
the same boxes, flips and programs) by what programs make of that; both in grey levels of 0 to 255. Exits with 1 if an
original differs by more than the bounds below.
"""

import sys
import tempfile
from collections.abc import Generator
from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from cocor.cli import command
from loaders.arguments import Parser, positive
from loaders.batch import IMAGENET_STD, Batch
from loaders.datasets.dataset import ImageDataset, open_folder
from loaders.datasets.stored import open_stored
from loaders.open import LoaderName, open_loader
from loaders.prep.convert import convert
from loaders.prep.encode import Settings
from loaders.prep.sources import open_source
from loaders.views.order import BatchOrder
from loaders.views.plan import ViewPlan

_BOUNDS: dict[LoaderName, float] = {"torch": 0.0, "dali": 0.5, "ffcv": 0.5}  # mean over the pixels of any one original
_EPOCH, _SEED = 2, 1


def main() -> None:
    """Print a line for every loader and number of ranks."""
    parser = Parser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--data", type=Path, required=True, help="class folders of images")
    parser.add_argument("--batch-size", type=positive, default=64)
    parser.add_argument("--image-size", type=positive, default=224)
    options = parser.parse_all()
    plan = ViewPlan(options.image_size, _SEED)
    with tempfile.TemporaryDirectory() as place:
        path = Path(place, "x.beton")
        convert(open_source(options.data), path, "beton", Settings())
        folder, stored = open_folder(options.data), open_stored(path)
        for world in (1, 2, 4):
            differences: dict[LoaderName, list[Tensor]] = {name: [] for name in _BOUNDS}
            seen: list[int] = []
            for rank in range(world):
                order = BatchOrder(
                    len(folder), options.batch_size, seed=_SEED, rank=rank, world_size=world, drop_last=False
                )
                seen += compare(folder, stored, plan, order, differences)
            if sorted(seen) != list(range(len(folder))):
                raise SystemExit(f"{world} ranks: an epoch does not show every image once")
            for name, found in differences.items():
                report(world, name, torch.cat(found).numpy())


def compare(
    folder: ImageDataset,
    stored: ImageDataset,
    plan: ViewPlan,
    order: BatchOrder,
    differences: dict[LoaderName, list[Tensor]],
) -> list[int]:
    """The images that a rank sees. Adds (B, 2) differences of originals and of views to ``differences``."""
    seen: list[int] = []
    with ExitStack() as stack:
        reference = stack.enter_context(closing(epoch("torch", folder, plan, order)))
        others = {name: stack.enter_context(closing(epoch(name, stored, plan, order))) for name in differences}
        for expected in reference:
            seen += expected.index.tolist()
            for name, batches in others.items():
                batch = next(batches, None)
                if batch is None:
                    raise SystemExit(f"{name}: fewer batches than the reference")
                for field in ("index", "label", "composition"):
                    if not torch.equal(getattr(batch, field), getattr(expected, field)):
                        raise SystemExit(f"{name}: another {field}")
                views = levels(batch.views, expected.views).mean(0)
                differences[name].append(torch.stack([levels(batch.original, expected.original), views], 1))
        if any(next(batches, None) is not None for batches in others.values()):
            raise SystemExit("a loader shows more batches than the reference")
    return seen


def epoch(name: LoaderName, dataset: ImageDataset, plan: ViewPlan, order: BatchOrder) -> Generator[Batch, None, None]:
    """The batches of one epoch, on the CPU. A rank without a share of the last one gets no batch from some loaders and
    an empty one from others, which is left out."""
    with closing(open_loader(name, dataset, plan, order, workers=0 if name == "torch" else 2)) as loader:
        yield from (batch for batch in loader.epoch(_EPOCH) if len(batch.index))


def levels(first: Tensor, second: Tensor) -> Tensor:
    """Mean absolute differences of images (..., 3, H, W) in grey levels."""
    std = torch.tensor(IMAGENET_STD).view(3, 1, 1)
    return ((first - second).abs() * std * 255).mean((-3, -2, -1))


def report(world: int, name: LoaderName, differences: np.ndarray) -> None:
    """Print the mean and the worst differences; leave if they are too large."""
    (original, views), (worst, worst_views) = differences.mean(0), differences.max(0)
    print(
        f"{world} rank{'s' * (world > 1):<1}  {name:<6}{len(differences):,} samples: originals {original:.3f} "
        f"(worst {worst:.3f}), views {views:.3f} (worst {worst_views:.3f}) grey levels"
    )
    if worst > _BOUNDS[name]:
        raise SystemExit(f"{name}: an original differs by more than {_BOUNDS[name]} grey levels")


if __name__ == "__main__":
    sys.exit(command("prep_agreement.py", main))
