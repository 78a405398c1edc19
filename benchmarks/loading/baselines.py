"""Baselines: DALI's own operators, torchvision, and decoding in memory.

DALI's graph is written for speed: each file is decoded once, a contrastive view takes one colour operator, and a blur
if it gets one. torchvision is used as in tutorials: a worker opens a file, makes its views one by one and sends float32
tensors. libjpeg-turbo is called by simplejpeg.
"""

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stderr
from io import BytesIO, StringIO
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, RandomSampler
from torchvision.transforms import v2

from benchmarks.loading.stages import FULL, PLAIN, Stage
from loaders.batch import Batch
from loaders.channels import IMAGENET_MEAN, IMAGENET_STD
from loaders.dali.pipeline import load_dali
from loaders.errors import UserError
from loaders.views.ops import BASIC, Op

_AHEAD = 2  # batches; DataLoader's own default
_MAGNITUDE = 10  # of DALI's 31 levels
Decode = Callable[[bytes], object]


def pipeline(
    paths: Sequence[str], stage: Stage, *, batch_size: int, size: int, threads: int, device: torch.device,
    hw_decoder_load: float,
) -> Any:  # fmt: skip
    """Build a DALI pipeline over ``paths``, endlessly shuffled.

    Outputs: decoded images, or normalised views (S, S, 3), float16 on the GPU and float32 on the CPU.
    """
    dali = load_dali()
    fn, types = dali.fn, dali.types
    on_gpu = device.type == "cuda"

    @dali.pipeline_def(
        batch_size=batch_size, num_threads=threads, device_id=device.index if on_gpu else None,
        prefetch_queue_depth=_AHEAD, exec_dynamic=True, enable_conditionals=True, seed=1,
    )  # fmt: skip
    def graph() -> Any:
        files, _ = fn.readers.file(files=list(paths), random_shuffle=True, name="files")
        gpu_options = {"hw_decoder_load": hw_decoder_load} if on_gpu else {}
        images = fn.decoders.image(files, device="mixed" if on_gpu else "cpu", output_type=types.RGB, **gpu_options)
        if stage == "decode":
            return images
        return _views(fn, types, images, stage, size, on_gpu)

    with redirect_stderr(StringIO()):  # DALI warns, whatever the filters, of old names that its auto_aug uses
        built = graph()
        built.build()
    return built


def batches(built: Any, device: torch.device) -> Iterator[list[Tensor]]:
    """Yield the views of each batch on ``device``; none of decoded images."""
    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
    while True:
        yield [torch.from_dlpack(output.as_tensor()) for output in built.run(stream) if output.is_dense_tensor()]


def _views(fn: Any, types: Any, images: Any, stage: Stage, size: int, on_gpu: bool) -> tuple[Any, ...]:
    """Make two contrastive views, the original, and perhaps its composites."""
    # DALI rewrites this code to find the branches of the graph, and understands only plain Python.
    how = {"size": (size, size), "random_area": (0.2, 1.0), "antialias": True, "interp_type": types.INTERP_LINEAR}
    crops = [fn.random_resized_crop(images, **how) for _ in range(3)]
    mirrors = [fn.random.coin_flip() for _ in range(3)]
    views = list(crops)
    if stage != "crops":
        views = [_contrastive(fn, types, crops[0]), _contrastive(fn, types, crops[1]), crops[2]]
    if stage in ("composites", "step"):
        from nvidia.dali.auto_aug.rand_augment import rand_augment

        views += [rand_augment(crops[2], n=n, m=_MAGNITUDE, shape=(size, size)) for n in (1, 2, 3)]
    return tuple(_normalised(fn, types, view, mirrors[min(at, 2)], on_gpu) for at, view in enumerate(views))


def _contrastive(fn: Any, types: Any, crop: Any) -> Any:
    jitter = fn.random.coin_flip(probability=0.8)
    grey = fn.random.coin_flip(probability=0.2)
    brightness, contrast, saturation = [1.0 + jitter * fn.random.uniform(range=(-0.4, 0.4)) for _ in range(3)]
    hue = jitter * fn.random.uniform(range=(-36.0, 36.0))
    view = fn.color_twist(crop, brightness=brightness, contrast=contrast, saturation=saturation * (1.0 - grey), hue=hue)
    if fn.random.coin_flip(probability=0.5, dtype=types.BOOL):
        result = fn.gaussian_blur(view, sigma=fn.random.uniform(range=(0.1, 2.0)), window_size=23)
    else:
        result = view
    return result


def _normalised(fn: Any, types: Any, view: Any, mirror: Any, on_gpu: bool) -> Any:
    return fn.crop_mirror_normalize(
        view, mirror=mirror, dtype=types.FLOAT16 if on_gpu else types.FLOAT, output_layout="HWC",
        mean=[255 * value for value in IMAGENET_MEAN], std=[255 * value for value in IMAGENET_STD],
    )  # fmt: skip


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
    """Views of a stage, float32 (3, S, S): contrastive, original, composites."""

    def __init__(self, paths: Sequence[str], stage: Stage, size: int) -> None:
        self._paths = paths
        chosen = PLAIN if stage == "crops" else FULL
        jitter = v2.ColorJitter(chosen.brightness, chosen.contrast, chosen.saturation, chosen.hue)
        self._crop = v2.Compose([v2.RandomResizedCrop(size, (0.2, 1.0), antialias=True), v2.RandomHorizontalFlip()])
        self._colour = v2.Compose([
            v2.RandomApply([jitter], chosen.jitter_prob), v2.RandomGrayscale(chosen.grayscale_prob),
            v2.RandomApply([v2.GaussianBlur(23, chosen.blur_sigma)], chosen.blur_prob),
        ])  # fmt: skip
        self._composites = [v2.RandAugment(num_ops=n) for n in (1, 2, 3)] if stage in ("composites", "step") else []
        normalize = v2.Normalize(list(IMAGENET_MEAN), list(IMAGENET_STD))
        self._finish = v2.Compose([v2.ToImage(), v2.ToDtype(torch.float32, scale=True), normalize])

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
    """Open a DataLoader of ``steps`` batches. UserError if shared memory is short."""
    needed = batch_size * sample_bytes * (_AHEAD * workers + 2)
    if Path("/dev/shm").is_dir() and shutil.disk_usage("/dev/shm").free < needed:
        raise UserError(f"its batches need {needed / 2**30:.1f} GiB of shared memory (/dev/shm); lower --batch-size")
    return DataLoader(
        dataset, batch_size, sampler=RandomSampler(dataset, num_samples=steps * batch_size), num_workers=workers,
        pin_memory=on_gpu, drop_last=True, prefetch_factor=_AHEAD, multiprocessing_context="fork",
    )  # fmt: skip


def to_batch(views: list[Tensor], device: torch.device, dtype: torch.dtype) -> Batch:
    """Move collated views (B, 3, S, S) to the device, with made-up compositions."""
    here = [view.to(device, non_blocking=True).to(dtype, memory_format=torch.channels_last) for view in views]
    count, composites = len(here[0]), here[3:]
    composition = torch.zeros(len(composites), count, len(BASIC), dtype=torch.uint8, device=device)
    for at in range(len(composites)):
        composition[at, :, int(Op.IDENTITY)] = at + 1
    nothing = torch.zeros(count, dtype=torch.int64, device=device)
    stacked = torch.stack(composites) if composites else here[0].new_empty(0)
    return Batch(torch.stack(here[:2]), here[2], stacked, composition, nothing, nothing)


def pillow_decode(data: bytes) -> object:
    return Image.open(BytesIO(data)).convert("RGB")


def decodable(decode: Decode, name: str, paths: Sequence[str]) -> tuple[list[bytes], str]:
    """Read the files that can be decoded, as failing takes no time; note how many."""
    found = []
    for data in (Path(path).read_bytes() for path in paths):
        try:
            decode(data)
        except (ValueError, RuntimeError, OSError):
            continue
        found.append(data)
    if not found:
        raise UserError(f"{name} can decode none of the images")
    return found, name if len(found) == len(paths) else f"{name}, {len(found):,} of {len(paths):,} images"
