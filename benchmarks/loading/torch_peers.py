"""Peers on PyTorch: torchvision, kornia and lightly, and decoding alone.

- torchvision is used as in tutorials: a worker opens a file, makes its views one by one and sends float32 tensors. On
  a GPU workers send the files' bytes, which nvJPEG decodes, and the same transforms run on the GPU's tensors.
- kornia gets batches of such decoded images. Crops of images of different sizes are torchvision's, all else is its own.
- lightly is its transform for MoCo v2, two views, in workers as torchvision's.
- libjpeg-turbo is called by simplejpeg.
"""

import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import simplejpeg
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, RandomSampler
from torchvision.io import decode_jpeg
from torchvision.transforms import v2

from benchmarks.loading.stages import FULL, PLAIN, Stage
from loaders.batch import Batch
from loaders.channels import IMAGENET_MEAN, IMAGENET_STD
from loaders.errors import UserError
from loaders.views.ops import BASIC, Op

_AHEAD = 2  # batches; DataLoader's own default
_MAGNITUDE = 10  # of kornia's 30 levels
Views = Callable[[Any], list[Tensor]]


class Each(Dataset):
    """What ``function`` makes of each of ``files``."""

    def __init__(self, files: Sequence[Any], function: Callable[[Any], Any]) -> None:
        self._files, self._function = files, function

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, place: int) -> Any:
        return self._function(self._files[place])


def open_file(path: str) -> Image.Image:
    """Decode a file with Pillow."""
    with Image.open(path) as image:
        return image.convert("RGB")


def torchvision_views(stage: Stage, size: int) -> Views:
    """Make views, float32 (3, S, S), of an image or a tensor: contrastive, original, composites."""
    chosen = PLAIN if stage == "crops" else FULL
    jitter = v2.ColorJitter(chosen.brightness, chosen.contrast, chosen.saturation, chosen.hue)
    crop = v2.Compose([v2.RandomResizedCrop(size, (0.2, 1.0), antialias=True), v2.RandomHorizontalFlip()])
    colour = v2.Compose([
        v2.RandomApply([jitter], chosen.jitter_prob), v2.RandomGrayscale(chosen.grayscale_prob),
        v2.RandomApply([v2.GaussianBlur(23, chosen.blur_sigma)], chosen.blur_prob),
    ])  # fmt: skip
    composites = [v2.RandAugment(num_ops=n) for n in (1, 2, 3)] if stage in ("composites", "step") else []
    normalize = v2.Normalize(list(IMAGENET_MEAN), list(IMAGENET_STD))
    finish = v2.Compose([v2.ToImage(), v2.ToDtype(torch.float32, scale=True), normalize])

    def views(image: Any) -> list[Tensor]:
        contrastive, original = [colour(crop(image)) for _ in range(2)], crop(image)
        return [finish(view) for view in (*contrastive, original, *(make(original) for make in composites))]

    return views


def torchvision_views_of_each(stage: Stage, size: int) -> Views:
    """Make the same views, float32 (B, 3, S, S), of a list of tensors."""
    views = torchvision_views(stage, size)
    return lambda images: [torch.stack(same) for same in zip(*map(views, images), strict=True)]


def kornia_views(stage: Stage, size: int) -> Views:
    """Make views, float32 (B, 3, S, S), of a list of tensors."""
    try:
        from kornia import augmentation as k
        from kornia.augmentation.auto import RandAugment
    except ImportError:
        raise UserError("kornia is not installed: pip install kornia") from None
    chosen = PLAIN if stage == "crops" else FULL
    crop, flip = v2.RandomResizedCrop(size, (0.2, 1.0), antialias=True), k.RandomHorizontalFlip()
    colour = torch.nn.Sequential(
        k.ColorJitter(chosen.brightness, chosen.contrast, chosen.saturation, chosen.hue, p=chosen.jitter_prob),
        k.RandomGrayscale(p=chosen.grayscale_prob),
        k.RandomGaussianBlur((23, 23), chosen.blur_sigma, p=chosen.blur_prob),
    )
    composites = [RandAugment(n, _MAGNITUDE) for n in (1, 2, 3)] if stage == "composites" else []
    normalize = k.Normalize(IMAGENET_MEAN, IMAGENET_STD)

    def views(images: list[Tensor]) -> list[Tensor]:
        one, other, original = (flip(torch.stack([crop(image) for image in images]) / 255) for _ in range(3))
        return [normalize(v) for v in (colour(one), colour(other), original, *(make(original) for make in composites))]

    return views


def lightly_views(_: Stage, size: int) -> Views:
    """Make lightly's two views of an image, in any stage."""
    try:
        from lightly.transforms import MoCoV2Transform
    except ImportError:
        raise UserError("lightly is not installed: pip install lightly") from None
    return cast(Views, MoCoV2Transform(input_size=size))


VIEWS: dict[str, Callable[[Stage, int], Views]] = {
    "torchvision": torchvision_views, "lightly": lightly_views,
    "torchvision-gpu": torchvision_views_of_each, "kornia": kornia_views,
}  # fmt: skip


def read_files(paths: Sequence[str]) -> Dataset:
    """Open a data set of the files' bytes, uint8 (bytes,)."""
    return Each(paths, lambda path: torch.frombuffer(bytearray(Path(path).read_bytes()), dtype=torch.uint8))


def side_by_side(files: list[Tensor]) -> tuple[Tensor, list[int]]:
    """Collate files into one tensor, as each tensor that a worker sends takes a file handle; and their lengths."""
    return torch.cat(files), [len(file) for file in files]


def decoded(loader: DataLoader, device: torch.device) -> Iterator[list[Tensor]]:
    """Decode the files that ``loader`` gives :func:`side_by_side`: uint8 (3, H, W) on ``device``."""
    for files, lengths in loader:
        yield decode_jpeg(list(files.split(lengths)), mode="RGB", device=device)


def data_loader(
    dataset: Any, batch_size: int, workers: int, steps: int, *, on_gpu: bool, sample_bytes: int,
    collate: Callable[[list[Any]], Any] | None = None,
) -> DataLoader:  # fmt: skip
    """Open a DataLoader of ``steps`` batches. UserError if shared memory is short."""
    needed = batch_size * sample_bytes * (_AHEAD * workers + 2)
    if Path("/dev/shm").is_dir() and shutil.disk_usage("/dev/shm").free < needed:
        raise UserError(f"its batches need {needed / 2**30:.1f} GiB of shared memory (/dev/shm); lower --batch-size")
    return DataLoader(
        dataset, batch_size, sampler=RandomSampler(dataset, num_samples=steps * batch_size), num_workers=workers,
        pin_memory=on_gpu, drop_last=True, prefetch_factor=_AHEAD, multiprocessing_context="fork", collate_fn=collate,
    )  # fmt: skip


def moved(views: Iterable[Tensor], device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    """Move views (B, 3, S, S) to the device, channels-last."""
    return [view.to(device, non_blocking=True).to(dtype, memory_format=torch.channels_last) for view in views]


def to_batch(views: list[Tensor]) -> Batch:
    """Make a batch of views (B, 3, S, S), with made-up compositions."""
    device = views[0].device
    count, composites = len(views[0]), views[3:]
    composition = torch.zeros(len(composites), count, len(BASIC), dtype=torch.uint8, device=device)
    for at in range(len(composites)):
        composition[at, :, int(Op.IDENTITY)] = at + 1
    nothing = torch.zeros(count, dtype=torch.int64, device=device)
    stacked = torch.stack(composites) if composites else views[0].new_empty(0)
    return Batch(torch.stack(views[:2]), views[2], stacked, composition, nothing, nothing)


def decodable(paths: Sequence[str]) -> tuple[list[str], str]:
    """Choose the JPEGs that libjpeg-turbo decodes to RGB; note how many, unless all."""
    found = []
    for path in paths:
        with suppress(ValueError, RuntimeError, OSError):
            simplejpeg.decode_jpeg(Path(path).read_bytes())
            found.append(path)
    if not found:
        raise UserError("libjpeg-turbo can decode none of the images")
    return found, "" if len(found) == len(paths) else f"{len(found):,} of {len(paths):,} images"
