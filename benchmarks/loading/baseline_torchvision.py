"""torchvision baseline: v2 transforms on Pillow images in a plain DataLoader, the same six views.

As in tutorials and published code, a worker opens a file, makes its views one by one and sends float32 tensors.
"""

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, RandomSampler
from torchvision.transforms import v2

from benchmarks.loading.stages import FULL, PLAIN, Stage
from loaders.batch import IMAGENET_MEAN, IMAGENET_STD, Batch
from loaders.errors import UserError
from loaders.views.ops import BASIC, Op

_AHEAD = 2  # DataLoader's own default


def open_file(path: str) -> Image.Image:
    """Decode a file with Pillow."""
    with Image.open(path) as image:
        return image.convert("RGB")


class Decoded(Dataset):
    """Decoded images, thrown away."""

    def __init__(self, files: Sequence[Any], decode: Callable[[Any], object]) -> None:
        self._files, self._decode = files, decode

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, place: int) -> int:
        self._decode(self._files[place])
        return 1


class Views(Dataset):
    """Views of a stage, float32 (3, S, S) each: two contrastive ones, the original, perhaps three composites."""

    def __init__(self, paths: Sequence[str], stage: Stage, size: int) -> None:
        self._paths = paths
        chosen = PLAIN if stage == "crops" else FULL
        jitter = v2.ColorJitter(chosen.brightness, chosen.contrast, chosen.saturation, chosen.hue)
        self._crop = v2.Compose([v2.RandomResizedCrop(size, (0.2, 1.0), antialias=True), v2.RandomHorizontalFlip()])
        self._colour = v2.Compose(
            [
                v2.RandomApply([jitter], chosen.jitter_prob),
                v2.RandomGrayscale(chosen.grayscale_prob),
                v2.RandomApply([v2.GaussianBlur(23, chosen.blur_sigma)], chosen.blur_prob),
            ]
        )
        self._composites = [v2.RandAugment(num_ops=n) for n in (1, 2, 3)] if stage in ("composites", "step") else []
        self._finish = v2.Compose(
            [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(list(IMAGENET_MEAN), list(IMAGENET_STD))]
        )

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, place: int) -> list[Tensor]:
        image = open_file(self._paths[place])
        contrastive = [self._finish(self._colour(self._crop(image))) for _ in range(2)]
        original = self._crop(image)
        return [*contrastive, self._finish(original), *(self._finish(make(original)) for make in self._composites)]


def data_loader(
    dataset: Decoded | Views, batch_size: int, workers: int, steps: int, *, on_gpu: bool, sample_bytes: int
) -> DataLoader:
    """Open a DataLoader with one epoch of ``steps`` batches. UserError if they do not fit into shared memory."""
    needed = batch_size * sample_bytes * (_AHEAD * workers + 2)
    if Path("/dev/shm").is_dir() and shutil.disk_usage("/dev/shm").free < needed:
        raise UserError(f"its batches need {needed / 2**30:.1f} GiB of shared memory (/dev/shm); lower --batch-size")
    return DataLoader(
        dataset, batch_size, sampler=RandomSampler(dataset, num_samples=steps * batch_size), num_workers=workers,
        pin_memory=on_gpu, drop_last=True, prefetch_factor=_AHEAD, multiprocessing_context="fork",
    )  # fmt: skip


def to_batch(views: list[Tensor], device: torch.device, dtype: torch.dtype) -> Batch:
    """Move collated views (B, 3, S, S) to the training device. Composition vectors are made up: v2 does not return
    what it drew, and the time of a step does not depend on it."""
    here = [view.to(device, non_blocking=True).to(dtype, memory_format=torch.channels_last) for view in views]
    count, composites = len(here[0]), here[3:]
    composition = torch.zeros(len(composites), count, len(BASIC), dtype=torch.uint8, device=device)
    for at in range(len(composites)):
        composition[at, :, int(Op.IDENTITY)] = at + 1
    nothing = torch.zeros(count, dtype=torch.int64, device=device)
    stacked = torch.stack(composites) if composites else here[0].new_empty(0)
    return Batch(torch.stack(here[:2]), here[2], stacked, composition, nothing, nothing)
