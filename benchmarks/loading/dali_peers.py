"""Peers on DALI: its own operators with auto_aug, and solo-learn's two views.

The graph of auto_aug is written for speed: each file is decoded once, a contrastive view takes one colour operator, and
a blur if it gets one. solo-learn's is written anew from its settings for MoCo v2 on ImageNet (symmetric_weak.yaml):
cubic crops of 8 % to 100 % of the area, and of every operation both outcomes, of which a coin chooses one.
"""

from collections.abc import Iterator, Sequence
from contextlib import redirect_stderr
from io import StringIO
from typing import Any

import torch
from torch import Tensor

from benchmarks.loading.stages import Stage
from loaders.channels import IMAGENET_MEAN, IMAGENET_STD
from loaders.dali.pipeline import load_dali

_AHEAD = 2  # batches
_MAGNITUDE = 10  # of DALI's 31 levels


def pipeline(
    paths: Sequence[str], stage: Stage, *, solo_learn: bool, batch_size: int, size: int, threads: int,
    device: torch.device, hw_decoder_load: float,
) -> Any:  # fmt: skip
    """Build a DALI pipeline over ``paths``, endlessly shuffled.

    Outputs: decoded images, or normalised views: of auto_aug (S, S, 3), float16 on the GPU and float32 on the CPU; of
    solo-learn (3, S, S), float32.
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
        if solo_learn:
            return tuple(_solo_learn(fn, types, images, size) for _ in range(2))
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
    layout = {"dtype": types.FLOAT16 if on_gpu else types.FLOAT, "output_layout": "HWC"}
    return tuple(_normalised(fn, view, mirrors[min(at, 2)], layout) for at, view in enumerate(views))


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


def _solo_learn(fn: Any, types: Any, images: Any, size: int) -> Any:
    view = fn.random_resized_crop(images, size=size, random_area=(0.08, 1.0), interp_type=types.INTERP_CUBIC)
    brightness, contrast, saturation = [fn.random.uniform(range=(0.6, 1.4)) for _ in range(3)]
    hue = fn.random.uniform(range=(-36.0, 36.0))
    jittered = fn.color_twist(view, brightness=brightness, contrast=contrast, saturation=saturation, hue=hue)
    view = _chosen(fn, types, 0.8, jittered, view)
    grey = fn.color_space_conversion(view, image_type=types.RGB, output_type=types.GRAY)
    view = _chosen(fn, types, 0.2, fn.cat(grey, grey, grey, axis=2), view)
    blurred = fn.gaussian_blur(view, sigma=fn.random.uniform(range=(0.1, 2.0)), window_size=23)
    view = _chosen(fn, types, 0.5, blurred, view)
    return _normalised(fn, view, fn.random.coin_flip(), {"dtype": types.FLOAT, "output_layout": "CHW"})


def _chosen(fn: Any, types: Any, probability: float, one: Any, other: Any) -> Any:
    coin = fn.random.coin_flip(probability=probability, dtype=types.BOOL)
    return coin * one + (coin ^ True) * other


def _normalised(fn: Any, view: Any, mirror: Any, layout: dict[str, Any]) -> Any:
    mean, std = ([255 * value for value in values] for values in (IMAGENET_MEAN, IMAGENET_STD))
    return fn.crop_mirror_normalize(view, mirror=mirror, mean=mean, std=std, **layout)
