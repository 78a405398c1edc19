"""DALI baseline: decoding alone, and all views with DALI's own operators and auto_aug's RandAugment.

Written for speed: each file is decoded once, a contrastive view takes one colour operator and a blur for the half that
gets one, flip and normalisation are one operator. Only RandAugment's structure, a branch per operation, is DALI's.
"""

from collections.abc import Iterator, Sequence
from contextlib import redirect_stderr
from io import StringIO
from typing import Any

import torch
from torch import Tensor

from benchmarks.loading.baseline_torchvision import to_batch
from benchmarks.loading.stages import Stage
from loaders.batch import IMAGENET_MEAN, IMAGENET_STD, Batch
from loaders.dali.pipeline import load_dali

_AHEAD = 2
_MAGNITUDE = 10  # of DALI's 31 levels


def pipeline(
    paths: Sequence[str], stage: Stage, *, batch_size: int, size: int, threads: int, device: torch.device,
    hw_decoder_load: float,
) -> Any:  # fmt: skip
    """Build a pipeline over ``paths``, endlessly shuffled. Outputs: decoded images, or for every view normalised
    (S, S, 3), float16 on the GPU and float32 on the CPU."""
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
    """Yield the views of each batch as tensors on ``device``; none of decoded images, which differ in size."""
    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
    while True:
        yield [torch.from_dlpack(output.as_tensor()) for output in built.run(stream) if output.is_dense_tensor()]


def training_batch(views: list[Tensor], device: torch.device, dtype: torch.dtype) -> Batch:
    """Convert views (B, S, S, 3) to a batch for the trainer."""
    return to_batch([view.permute(0, 3, 1, 2) for view in views], device, dtype)


def _views(fn: Any, types: Any, images: Any, stage: Stage, size: int, on_gpu: bool) -> tuple[Any, ...]:
    """Make two contrastive views, the original, and perhaps its composites."""
    # DALI rewrites this code to find the branches of the graph, and understands only plain Python.
    crops = [
        fn.random_resized_crop(
            images, size=(size, size), random_area=(0.2, 1.0), antialias=True, interp_type=types.INTERP_LINEAR
        )
        for _ in range(3)
    ]
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
    view = fn.color_twist(
        crop,
        brightness=1.0 + jitter * fn.random.uniform(range=(-0.4, 0.4)),
        contrast=1.0 + jitter * fn.random.uniform(range=(-0.4, 0.4)),
        saturation=(1.0 + jitter * fn.random.uniform(range=(-0.4, 0.4))) * (1.0 - grey),
        hue=jitter * fn.random.uniform(range=(-36.0, 36.0)),
    )
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
