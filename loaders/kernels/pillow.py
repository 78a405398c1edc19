"""Reference executor: view programs run by Pillow and torchvision, op by op.

This is the usual CPU data path of contrastive learning (PIL images, then ToTensor and Normalize). Tests compare the
executors with it and ``benchmarks/kernel.py --cpu`` times it; training never uses it.
"""

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageEnhance, ImageOps
from torchvision.transforms import functional

from loaders.views.ops import END, Op

NEAREST, AFFINE = Image.Resampling.NEAREST, Image.Transform.AFFINE


def _warp(image: Image.Image, *matrix: float) -> Image.Image:
    return image.transform(image.size, AFFINE, matrix, NEAREST)


def _posterize(image: Image.Image, bits: int) -> Image.Image:
    # recent versions of Pillow refuse to drop all eight bits
    return ImageOps.posterize(image, bits) if bits > 0 else Image.new("RGB", image.size)


OPERATIONS: dict[Op, Callable[[Image.Image, float], Image.Image]] = {
    Op.AUTO_CONTRAST: lambda image, _: ImageOps.autocontrast(image),
    Op.BRIGHTNESS: lambda image, factor: ImageEnhance.Brightness(image).enhance(factor),
    Op.COLOR: lambda image, factor: ImageEnhance.Color(image).enhance(factor),
    Op.CONTRAST: lambda image, factor: ImageEnhance.Contrast(image).enhance(factor),
    Op.EQUALIZE: lambda image, _: ImageOps.equalize(image),
    Op.IDENTITY: lambda image, _: image,
    Op.POSTERIZE: lambda image, bits: _posterize(image, int(bits)),
    Op.ROTATE: lambda image, degrees: image.rotate(degrees, NEAREST),
    Op.SHARPNESS: lambda image, factor: ImageEnhance.Sharpness(image).enhance(factor),
    Op.SHEAR_X: lambda image, v: _warp(image, 1, v, 0, 0, 1, 0),
    Op.SHEAR_Y: lambda image, v: _warp(image, 1, 0, 0, v, 1, 0),
    Op.SOLARIZE: lambda image, threshold: ImageOps.solarize(image, int(threshold)),
    Op.TRANSLATE_X: lambda image, v: _warp(image, 1, 0, int(v * image.width), 0, 1, 0),
    Op.TRANSLATE_Y: lambda image, v: _warp(image, 1, 0, 0, 0, 1, int(v * image.height)),
    Op.HUE: lambda image, factor: functional.adjust_hue(image, factor),
    Op.GRAYSCALE: lambda image, _: functional.to_grayscale(image, num_output_channels=3),
    Op.GAUSSIAN_BLUR: lambda image, sigma: functional.gaussian_blur(image, [23, 23], [sigma, sigma]),
}


def run_program(image: Image.Image, codes: Iterable[int], magnitudes: Iterable[float]) -> Image.Image:
    """Apply ops until ``END``; magnitudes are the physical values of the plan."""
    for code, magnitude in zip(codes, magnitudes, strict=True):
        if code == END:
            break
        image = OPERATIONS[Op(code)](image, float(magnitude))
    return image


def view(crop: NDArray[np.uint8], flip: bool, codes: Iterable[int], magnitudes: Iterable[float]) -> Image.Image:
    """Make one view, an RGB image, of a crop, uint8 (S, S, 3)."""
    image = Image.fromarray(crop)
    if flip:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return run_program(image, codes, magnitudes)


def normalise(image: Image.Image, mean: Sequence[float], std: Sequence[float]) -> torch.Tensor:
    """Apply ToTensor and Normalize: float32 (3, S, S)."""
    return functional.normalize(functional.to_tensor(image), list(mean), list(std))
