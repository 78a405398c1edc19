"""The fast resize is Pillow's within a grey level or two, whatever the box."""

import numpy as np
import pytest
from PIL import Image

from loaders.kernels.resize import resize_crops
from loaders.torch_loader import resized_crop
from loaders.views.plan import ViewPlan


def crops_of(image: Image.Image, boxes: np.ndarray, size: int) -> np.ndarray:
    out = np.full((len(boxes), size, size, 3), 99, np.uint8)
    resize_crops(np.asarray(image).reshape(-1), image.height, image.width, boxes, size, out)
    return out


def differences(image: Image.Image, boxes: np.ndarray, size: int) -> list[np.ndarray]:
    found = crops_of(image, boxes, size).astype(int)
    return [np.abs(crop - resized_crop(image, box, size)) for crop, box in zip(found, boxes, strict=True)]


@pytest.mark.parametrize("size", [1, 7, 32, 224])
def test_boxes_of_the_plan_look_like_pillows(photos: dict[str, Image.Image], size: int) -> None:
    for image in photos.values():
        sizes = np.tile(np.array([image.height, image.width], np.int32), (12, 1))
        boxes = ViewPlan(size).draw(0, np.arange(12), sizes).boxes.reshape(-1, 4)
        for difference in differences(image, boxes, size):
            assert difference.max() <= 2 and (size < 32 or difference.mean() < 0.3)


def exact_crop(pixels: np.ndarray, box: np.ndarray, size: int) -> np.ndarray:
    """The definition: weights of 8 bits that sum to 256; rows are mixed and rounded first, columns then."""
    top, left, height, width = (int(value) for value in box)
    down, across = exact_weights(top, height, len(pixels), size), exact_weights(left, width, pixels.shape[1], size)
    rows = (np.einsum("yi,ijc->yjc", down, pixels.astype(np.int64)) + 128) >> 8
    return (np.einsum("xj,yjc->yxc", across, rows) + 128) >> 8


def exact_weights(begin: int, length: int, limit: int, size: int) -> np.ndarray:
    weights = np.zeros((size, limit), np.int64)
    scale = length / size
    reach = max(scale, 1.0)
    for x in range(size):
        centre = begin + (x + 0.5) * scale
        places = np.arange(max(0, int(centre - reach + 0.5)), min(limit, int(centre + reach + 0.5)))
        sums = np.cumsum(np.maximum(0.0, reach - np.abs(places + 0.5 - centre)))
        weights[x, places] = np.diff((sums * (256 / sums[-1]) + 0.5).astype(np.int64), prepend=0)
    return weights


@pytest.mark.parametrize("size", [1, 5, 16, 31, 33, 64, 80])
def test_every_bit_is_as_defined(size: int) -> None:
    rng = np.random.default_rng(size)
    for height, width in [(1, 1), (2, 90), (90, 2), (43, 42), (43, 43), (40, 86), (150, 200), (200, 431)]:
        pixels = rng.integers(0, 256, (height, width, 3), np.uint8)
        heights, widths = rng.integers(1, height + 1, 4), rng.integers(1, width + 1, 4)
        boxes = np.array([heights * 0, widths * 0, heights, widths], np.int32).T
        boxes[1:, 0], boxes[1:, 1] = rng.integers(0, height - heights[1:] + 1), rng.integers(0, width - widths[1:] + 1)
        room = np.full((6, size, size, 3), 99, np.uint8)
        resize_crops(pixels.reshape(-1), height, width, boxes, size, room[1:5])
        for crop, box in zip(room[1:5], boxes, strict=True):
            assert np.array_equal(crop, exact_crop(pixels, box, size))
        assert (room[[0, 5]] == 99).all()
