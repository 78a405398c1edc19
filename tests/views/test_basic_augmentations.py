"""The 14 basic augmentations mean what Pillow means by them: not one value may differ."""

from itertools import product

import numpy as np
import pytest
from helpers.pictures import assert_equal_to_pillow, generated, photographs, pictures, run_on_cpu

from loaders.views.ops import BASIC, RANGES, Op

ENHANCEMENTS = (Op.BRIGHTNESS, Op.COLOR, Op.CONTRAST, Op.SHARPNESS)
FACTORS = (-0.5, 0.0, 0.05, 0.3, 0.5, 0.95, 1.0, 1.05, 1.3, 1.9, 4.0)
SHARES = (0, 1e-3, 0.1, 0.25, 0.3, 0.5, 1, 2)
EXTREMES: dict[Op, tuple[float, ...]] = {
    **dict.fromkeys(ENHANCEMENTS, FACTORS),
    **dict.fromkeys((Op.SHEAR_X, Op.SHEAR_Y, Op.TRANSLATE_X, Op.TRANSLATE_Y), SHARES),
    Op.POSTERIZE: tuple(range(9)),
    Op.SOLARIZE: (0, 1, 2, 100, 128, 254, 255, 256),
    Op.ROTATE: (0, 1e-3, 7.3, 17, 29.9, 30, 45, 60, 90, 135, 180, 270, 359),
}
SIGNED = (Op.ROTATE, Op.SHEAR_X, Op.SHEAR_Y, Op.TRANSLATE_X, Op.TRANSLATE_Y)


def draw_magnitude(op: Op, rng: np.random.Generator, magnitudes: str = "uniform") -> float:
    low, high, integer, signed = RANGES[magnitudes].get(op, (0, 0, False, False))  # type: ignore[call-overload]
    value = rng.integers(int(low), int(high) + 1) if integer else rng.uniform(low, high)
    return float(value) * (rng.choice([-1, 1]) if signed else 1)


@pytest.mark.parametrize("op", BASIC, ids=lambda op: op.label)
def test_every_setting_on_photographs(op: Op) -> None:
    rng = np.random.default_rng(int(op))
    settings = [draw_magnitude(op, rng) for _ in range(20)] + [draw_magnitude(op, rng, "released") for _ in range(2)]
    low, high, _, signed = RANGES["uniform"].get(op, (0, 0, False, False))
    settings += [low, high, -low, -high] if signed else [low, high]
    assert_equal_to_pillow(photographs(224), [[(op, value)] for value in sorted(set(settings))])


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 33, 64])
@pytest.mark.parametrize("op", BASIC, ids=lambda op: op.label)
def test_extreme_settings_at_all_sizes(op: Op, size: int) -> None:
    settings = EXTREMES.get(op, (0,))
    if op in SIGNED:
        settings += tuple(-value for value in settings)
    assert_equal_to_pillow(pictures(size), [[(op, value)] for value in settings])


def test_every_threshold_and_many_angles() -> None:
    assert_equal_to_pillow(generated(32)[:4], [[(Op.SOLARIZE, threshold)] for threshold in range(257)])
    angles = np.random.default_rng(0).uniform(-180, 180, 300)
    assert_equal_to_pillow(generated(97)[3:4], [[(Op.ROTATE, angle)] for angle in angles])


def test_every_pair_of_operations() -> None:
    rng = np.random.default_rng(1)
    for first, second in product(BASIC, BASIC):
        programs = [[(op, draw_magnitude(op, rng)) for op in (first, second)] for _ in range(2)]
        assert_equal_to_pillow(pictures(24)[[0, 5, 6, 9]], programs)
    for op in BASIC:  # again and again
        assert_equal_to_pillow(photographs(48)[:3], [[(op, draw_magnitude(op, rng)) for _ in range(5)]])


@pytest.mark.parametrize("length", range(1, 11))
def test_random_composites(length: int) -> None:
    rng = np.random.default_rng(100 + length)
    for size in (6, 31, 64):
        programs = [[(op, draw_magnitude(op, rng)) for op in rng.choice(BASIC, length)] for _ in range(40)]
        programs = [[(Op(op), magnitude) for op, magnitude in program] for program in programs]
        assert_equal_to_pillow(pictures(size)[rng.integers(0, 14, 4)], programs)


def test_random_composites_at_full_size() -> None:
    rng = np.random.default_rng(7)
    for image in photographs(224):
        programs = [[(Op(op), draw_magnitude(Op(op), rng)) for op in rng.choice(BASIC, 3)] for _ in range(25)]
        assert_equal_to_pillow(image[None], programs)


def test_strong_composites_beyond_the_ranges() -> None:
    rng = np.random.default_rng(8)
    for _ in range(60):
        ops = [Op(op) for op in rng.choice(BASIC, 4)]
        program = [
            (op, float(rng.choice(EXTREMES.get(op, (0,)))) * rng.choice([-1, 1] if op in SIGNED else [1])) for op in ops
        ]
        assert_equal_to_pillow(pictures(21), [program])


def test_later_operations_see_the_fill_of_warps() -> None:
    image = photographs(32)[:1]
    view = run_on_cpu(image, [[(Op.TRANSLATE_X, 0.25), (Op.SOLARIZE, 0)]])[0]
    assert (view[:, 24:] == 255).all()
    assert_equal_to_pillow(image, [[(Op.TRANSLATE_Y, -0.3), (Op.EQUALIZE, 0), (Op.ROTATE, 20), (Op.CONTRAST, 0.2)]])


def test_released_magnitudes_by_example() -> None:
    image = photographs(40)[:1]
    assert (run_on_cpu(image, [[(Op.POSTERIZE, 8)]]) == image).all()
    assert (run_on_cpu(image, [[(Op.SOLARIZE, 0)]]) == 255 - image).all()
