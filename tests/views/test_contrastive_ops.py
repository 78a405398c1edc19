"""The ops of contrastive views: Hue and Grayscale equal torchvision on PIL images, GaussianBlur within one level."""

from itertools import permutations

import numpy as np
import pytest
import torch
from helpers.pictures import assert_equal_to_pillow, generated, photographs, pictures, run_on_cpu
from numpy.typing import NDArray
from PIL import Image
from torchvision.transforms import ColorJitter, functional

from loaders.kernels.lower import BLUR_TAPS, lower
from loaders.kernels.pointwise import shift_hue
from loaders.views.ops import Op

SIGMAS = (0.1, 0.2, 0.3, 0.5, 0.8, 1.0, 1.3, 1.7, 2.0, 3.5)


def words(image: Image.Image) -> NDArray[np.uint32]:
    red, green, blue = (np.asarray(band, np.uint32).reshape(-1) for band in image.split())
    return red | green << 8 | blue << 16


@pytest.mark.parametrize("factor", [0.0, 0.1, -0.1, 0.5, -0.5])
def test_hue_of_all_colours_equals_torchvision(factor: float) -> None:
    colours = np.arange(1 << 24, dtype=np.uint32)
    channels = np.stack([colours & 255, colours >> 8 & 255, colours >> 16], axis=-1).astype(np.uint8)
    expected = functional.adjust_hue(Image.fromarray(channels.reshape(4096, 4096, 3)), factor)
    out = np.empty_like(colours)
    shift = int(lower(np.array([Op.HUE], np.uint8), np.array([factor], np.float32), 4096)[0, 0])
    shift_hue(colours, shift, out)
    assert (out == words(expected)).all()


def test_hue_and_grayscale_equal_torchvision() -> None:
    factors = np.linspace(-0.5, 0.5, 401).astype(np.float32)
    assert_equal_to_pillow(pictures(16), [[(Op.HUE, factor)] for factor in factors])
    for size in (1, 2, 31, 224):
        assert_equal_to_pillow(pictures(size), [[(Op.GRAYSCALE, 0)]])


def test_colour_jitter_equals_torchvision() -> None:
    image = photographs(96)[0]
    jitter = ColorJitter(0.4, 0.4, 0.4, 0.1)
    torch.manual_seed(0)
    ops = (Op.BRIGHTNESS, Op.CONTRAST, Op.COLOR, Op.HUE)  # torchvision's numbers 0 to 3; Color is its saturation
    for order in permutations(range(4)):
        _, *factors = jitter.get_params(jitter.brightness, jitter.contrast, jitter.saturation, jitter.hue)
        expected = Image.fromarray(image)
        for number in order:
            adjust = getattr(functional, "adjust_" + ("brightness", "contrast", "saturation", "hue")[number])
            expected = adjust(expected, factors[number])
        view = run_on_cpu(image[None], [[(ops[number], factors[number]) for number in order]])[0]
        assert (view == np.asarray(expected)).all(), order


@pytest.mark.parametrize("sigma", SIGMAS)
def test_blur_is_within_one_of_torchvision(sigma: float) -> None:
    for images in (photographs(64), photographs(224)[:2], generated(12)):
        views = run_on_cpu(images, [[(Op.GAUSSIAN_BLUR, sigma)]] * len(images))
        for view, image in zip(views, images, strict=True):
            expected = np.asarray(functional.gaussian_blur(Image.fromarray(image), [23, 23], [sigma, sigma]), int)
            assert np.abs(view - expected).max() <= 1
            if images is not generated(12):  # where whole pictures may lie half-way between two levels
                assert (view != expected).mean() < 0.01


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 11, 12, 13, 23, 24, 31, 32, 33, 50])
def test_blur_equals_its_definition_in_integers(size: int) -> None:
    for sigma in (*SIGMAS, 12.0):
        images = pictures(size)
        views = run_on_cpu(images, [[(Op.GAUSSIAN_BLUR, sigma)]] * len(images))
        assert (views == blur_by_definition(images, sigma)).all()


def blur_by_definition(images: NDArray[np.uint8], sigma: float) -> NDArray[np.uint8]:
    params = lower(np.array([Op.GAUSSIAN_BLUR], np.uint8), np.array([sigma], np.float32), images.shape[1])[0]
    half = params[:6].copy().view(np.uint16).astype(np.int64)
    weights = np.concatenate([half[:0:-1], half])
    across = blur_axis(images.astype(np.int64), weights, axis=2)
    return (blur_axis((across + 64) >> 7, weights, axis=1) + (1 << 22) >> 23).astype(np.uint8)


def blur_axis(values: NDArray[np.int64], weights: NDArray[np.int64], axis: int) -> NDArray[np.int64]:
    reach = BLUR_TAPS - 1
    margins = [(reach, reach) if a == axis else (0, 0) for a in range(values.ndim)]
    padded = np.pad(values, margins, mode="reflect")
    size = values.shape[axis]
    return sum(w * np.take(padded, range(k, k + size), axis) for k, w in enumerate(weights))


def test_blur_weights_sum_to_one() -> None:
    for sigma in (1e-3, *SIGMAS, 50.0):
        params = lower(np.array([Op.GAUSSIAN_BLUR], np.uint8), np.array([sigma], np.float32), 224)[0]
        half = params[:6].copy().view(np.uint16).astype(int)
        assert half[0] + 2 * half[1:].sum() == 1 << 15
        assert params[6] == max(k for k in range(BLUR_TAPS) if half[k] > 0)
        assert (np.diff(half[1:]) <= 0).all()  # the centre takes what rounding leaves, so may be a unit off
    flat = np.full((1, 20, 20, 3), (0, 131, 255), np.uint8)
    for sigma in SIGMAS:
        assert (run_on_cpu(flat, [[(Op.GAUSSIAN_BLUR, sigma)]]) == flat).all()


def test_contrastive_programs_end_to_end() -> None:
    """Jitter, Grayscale and Solarize in one program, to the bit; the blur, within one, is tested alone."""
    rng = np.random.default_rng(3)
    jitter = (Op.BRIGHTNESS, Op.CONTRAST, Op.COLOR, Op.HUE)
    programs = []
    for _ in range(40):
        factors = [*rng.uniform(0.6, 1.4, 3), rng.uniform(-0.1, 0.1)]
        program = [(jitter[k], float(factors[k])) for k in rng.permutation(4)]
        if rng.random() < 0.5:
            program.append((Op.GRAYSCALE, 0.0))
        if rng.random() < 0.5:
            program.append((Op.SOLARIZE, 128.0))
        programs.append(program)
    assert_equal_to_pillow(pictures(48), programs)
