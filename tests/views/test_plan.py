"""The view plan is a pure function, and what it draws has the distributions that the recipes promise."""

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy import stats
from torchvision.transforms import RandomResizedCrop

from loaders.errors import UserError
from loaders.views import ops
from loaders.views.ops import END, Op
from loaders.views.parameters import PARAMETERS, view_parameters
from loaders.views.philox import philox4x32, uniform
from loaders.views.plan import Augmentation, PlannedBatch, ViewPlan

SIZE = (375, 500)


def draw(plan: ViewPlan, count: int, epoch: int = 0, size: tuple[int, int] = SIZE) -> PlannedBatch:
    return plan.draw(epoch, np.arange(count), np.tile(np.array([size], np.int32), (count, 1)))


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((2**32 - 1,) * 4, (2**32 - 1,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0),
         (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
    ],
)  # fmt: skip
def test_philox_gives_the_published_known_answers(
    counter: tuple[int, ...], key: tuple[int, int], expected: tuple[int, ...]
) -> None:
    assert tuple(int(word) for word in philox4x32(*counter, *key)) == expected


def test_uniform_draws_are_uniform() -> None:
    draws = np.array([uniform(3, 1, index, 7, 0) for index in range(20_000)])
    assert draws.min() >= 0 and draws.max() < 1
    counts, _ = np.histogram(draws, bins=20, range=(0, 1))
    assert abs(counts - 1000).max() < 5 * np.sqrt(1000)


def test_views_are_described_by_what_was_drawn() -> None:
    strong = Augmentation(blur_prob=1.0, solarize_prob=0.5)
    planned = draw(ViewPlan(contrastive=(strong, Augmentation())), 50)
    described = view_parameters(planned, np.tile(np.array([SIZE], np.int32), (50, 1)), 2)
    for view, row in enumerate(described):
        for b, values in enumerate(row.tolist()):
            found = dict(zip(PARAMETERS, values, strict=True))
            top, left, height, width = planned.boxes[b, view] / np.array([*SIZE, *SIZE])
            box = [top + height / 2, left + width / 2, height, width]
            assert values[:5] == pytest.approx([*box, planned.flips[b, view]])
            expected = dict.fromkeys(PARAMETERS[5:], 0.0) | dict.fromkeys(("brightness", "contrast", "saturation"), 1.0)
            for place, (code, value) in enumerate(
                zip(planned.codes[b, view], planned.magnitudes[b, view], strict=True)
            ):
                if code != END:
                    name = {Op.COLOR: "saturation", Op.GRAYSCALE: "grey", Op.GAUSSIAN_BLUR: "blur"}.get(Op(code))
                    name = name or Op(code).name.lower()
                    expected[name] = 1.0 if name in ("grey", "solarize") else value
                    if f"{name}_place" in expected:
                        expected[f"{name}_place"] = place
            assert {name: found[name] for name in expected} == pytest.approx(expected)


@pytest.mark.parametrize("original", ["shared", "weak", "none"])
def test_further_views_keep_a_part_of_the_first(original: str) -> None:
    plan = ViewPlan(original=original, lengths=() if original == "none" else (1, 2))  # type: ignore[arg-type]
    without = draw(plan, 50)
    planned, layout = draw(replace(plan, kept=("crop", "color")), 50), replace(plan, kept=("crop", "color")).layout
    crop, color = layout.views - 2, layout.views - 1
    assert layout.crop_of_view[crop] == 0 and layout.crop_of_view[color] == layout.crops - 1
    for name in ("boxes", "flips", "codes", "magnitudes"):
        old, new = getattr(without, name), getattr(planned, name)
        assert np.array_equal(old, new[:, : old.shape[1]])  # all else is drawn as without them
    assert np.array_equal(planned.codes[:, color], planned.codes[:, 0])
    assert np.array_equal(planned.magnitudes[:, color], planned.magnitudes[:, 0])
    assert (planned.magnitudes[:, crop] != planned.magnitudes[:, 0]).any(1).mean() > 0.9
    assert (planned.boxes[:, -1] != planned.boxes[:, 0]).any(1).all()
    assert np.array_equal(planned.composition, without.composition)


@pytest.mark.parametrize("original", ["shared", "weak", "center", "none"])
def test_a_sample_is_planned_alike_in_any_batch(original: str) -> None:
    lengths = (1, 2, 3) if original in ("shared", "weak") else ()
    plan = ViewPlan(original=original, lengths=lengths, originals=2)  # type: ignore[arg-type]
    rng = np.random.default_rng(0)
    index = rng.permutation(500)[:64]
    sizes = rng.integers(20, 900, (64, 2)).astype(np.int32)
    together = plan.draw(5, index, sizes)
    for at in (0, 13, 63):
        alone = plan.draw(5, index[at : at + 1], sizes[at : at + 1])
        for name in ("boxes", "flips", "codes", "magnitudes"):
            assert np.array_equal(getattr(together, name)[at], getattr(alone, name)[0]), name
        assert np.array_equal(together.composition[:, at], alone.composition[:, 0])


def test_views_differ_in_all_respects() -> None:
    first, second = draw(ViewPlan(), 64, epoch=0), draw(ViewPlan(), 64, epoch=1)
    other_seed = draw(ViewPlan(seed=1), 64)
    for a, b in ((first, second), (first, other_seed)):
        assert (a.boxes != b.boxes).any(axis=(1, 2)).mean() > 0.95
        assert not np.array_equal(a.magnitudes, b.magnitudes)
    assert len(np.unique(first.boxes.reshape(-1, 4), axis=0)) > 0.95 * 64 * 3
    assert (first.boxes[:, 0] != first.boxes[:, 1]).any(axis=1).mean() > 0.95
    assert abs(draw(ViewPlan(), 10_000).flips.mean(axis=0) - 0.5).max() < 0.02


@pytest.mark.parametrize("size", [(375, 500), (64, 64), (1200, 300)])
def test_crop_boxes_are_as_promised(size: tuple[int, int]) -> None:
    boxes = draw(ViewPlan(), 5000, size=size).boxes.reshape(-1, 4).astype(float)
    top, left, height, width = boxes.T
    assert (top >= 0).all() and (left >= 0).all()
    assert (top + height <= size[0]).all() and (left + width <= size[1]).all()
    area, ratio = height * width / (size[0] * size[1]), width / height
    rounding = 1.0 / np.minimum(height, width)  # a side is off by at most half a pixel
    assert (area <= 1.0 + 1e-9).all()
    assert (ratio >= 0.75 * (1 - 1.5 * rounding)).all() and (ratio <= 4 / 3 * (1 + 1.5 * rounding)).all()
    if size[0] == size[1]:
        assert (area >= 0.2 * (1 - 2 * rounding)).all()
        assert area.min() < 0.22 and area.max() > 0.9


def unlike(one: NDArray, other: NDArray | tuple[float, float]) -> bool:
    """Whether draws have another distribution than others, or than the uniform one between two ends."""
    if isinstance(other, tuple):
        return stats.kstest(one, stats.uniform(other[0], other[1] - other[0]).cdf).pvalue < 1e-4
    return stats.ks_2samp(one, other).pvalue < 1e-4


def sides(boxes: NDArray) -> list[NDArray]:
    """Top, left, height, width, area and aspect of boxes (N, 4)."""
    top, left, height, width = boxes.T
    return [top, left, height, width, height * width, width / height]


@pytest.mark.parametrize("size", [(375, 500), (32, 32), (200, 900)])
def test_crop_boxes_follow_torchvisions(size: tuple[int, int]) -> None:
    torch.manual_seed(0)
    image = torch.empty(1, *size)
    expected = np.array([RandomResizedCrop.get_params(image, [0.2, 1.0], [3 / 4, 4 / 3]) for _ in range(4000)])
    for boxes in draw(ViewPlan(), 4000, size=size).boxes.swapaxes(0, 1):
        assert not any(unlike(got, wanted) for got, wanted in zip(sides(boxes), sides(expected), strict=True))
    wider = draw(ViewPlan(contrastive=(Augmentation((0.08, 1.0)),)), 4000, size=size).boxes[:, 0]
    assert unlike(sides(wider)[4], sides(expected)[4])  # the test can tell


@pytest.mark.parametrize("size", [(1, 1), (1, 700), (900, 2), (3, 5)])
def test_extreme_image_shapes_still_get_a_box(size: tuple[int, int]) -> None:
    for plan in (ViewPlan(), ViewPlan(original="center", lengths=())):
        boxes = draw(plan, 200, size=size).boxes.reshape(-1, 4)
        assert (boxes[:, 2:] >= 1).all()
        assert (boxes[:, 0] + boxes[:, 2] <= size[0]).all() and (boxes[:, 1] + boxes[:, 3] <= size[1]).all()


@pytest.mark.parametrize("pool", ["all", "color", "affine"])
@pytest.mark.parametrize("lengths", [(1, 2, 3), (2,), (10, 5)])
def test_composition_is_the_programs_histogram(pool: str, lengths: tuple[int, ...]) -> None:
    planned = draw(ViewPlan(pool=pool, lengths=lengths), 300)
    allowed = {int(op) for op in ops.POOLS[pool]}
    for at, length in enumerate(lengths):
        codes = planned.codes[:, 3 + at]
        assert (planned.composition[at].sum(-1) == length).all()
        for sample in range(300):
            program = codes[sample][codes[sample] != END]
            assert set(program.tolist()) <= allowed
            assert np.array_equal(np.bincount(program, minlength=14), planned.composition[at, sample])


def test_released_composites_count_their_own_ops() -> None:
    planned = draw(ViewPlan(original="weak", originals=5), 200)
    assert planned.boxes.shape == (200, 2 + 5 + 3, 4)
    assert planned.codes.shape == (200, 10, 10)
    assert [int(planned.composition[at].sum()) for at in range(3)] == [200, 400, 600]
    program_lengths = (planned.codes[:, 9] != END).sum(-1)
    assert program_lengths.max() > 3 and program_lengths.min() >= 3


@pytest.mark.parametrize("magnitudes", ["uniform", "released"])
def test_magnitudes_fill_their_ranges(magnitudes: ops.Magnitudes) -> None:
    planned = draw(ViewPlan(lengths=(1,), magnitudes=magnitudes), 30_000)
    codes, values = planned.codes[:, 3, 0], planned.magnitudes[:, 3, 0]
    for op, (low, high, whole, signed) in ops.RANGES[magnitudes].items():
        drawn = values[codes == op]
        size = np.abs(drawn)
        assert size.min() >= low - 1e-6 and size.max() <= high + 1e-6, op
        assert size.max() > high - 0.02 * (high - low) - 1e-6 and size.min() < low + 0.02 * (high - low) + 1e-6, op
        assert ((drawn < 0).mean() > 0.4) == signed, op
        if whole:
            assert np.array_equal(drawn, np.round(drawn)), op


def test_contrastive_programs_follow_moco_v2() -> None:
    codes = draw(ViewPlan(), 10_000).codes[:, 0]
    rate = {op: float((codes == op).any(-1).mean()) for op in Op}
    for op in (Op.BRIGHTNESS, Op.CONTRAST, Op.COLOR, Op.HUE):
        assert abs(rate[op] - 0.8) < 0.02
    assert abs(rate[Op.GRAYSCALE] - 0.2) < 0.02 and abs(rate[Op.GAUSSIAN_BLUR] - 0.5) < 0.02
    assert rate[Op.SOLARIZE] == 0
    first = codes[:, 0][codes[:, 0] < 15]
    jitter = first[np.isin(first, [Op.BRIGHTNESS, Op.CONTRAST, Op.COLOR, Op.HUE])]
    shares = [(jitter == op).mean() for op in (Op.BRIGHTNESS, Op.CONTRAST, Op.COLOR, Op.HUE)]
    assert max(abs(share - 0.25) for share in shares) < 0.02  # every order of the four ops


def test_strengths_are_drawn_evenly() -> None:
    planned = draw(ViewPlan(), 10_000)
    factor, turn, share = (0.05, 0.95), (-30.0, 30.0), (-0.3, 0.3)
    jitter = dict.fromkeys((Op.BRIGHTNESS, Op.CONTRAST, Op.COLOR), (0.6, 1.4))
    contrastive = jitter | {Op.HUE: (-0.1, 0.1), Op.GAUSSIAN_BLUR: (0.1, 2.0)}
    composite = dict.fromkeys((Op.BRIGHTNESS, Op.CONTRAST, Op.COLOR, Op.SHARPNESS), factor) | {Op.ROTATE: turn}
    composite |= dict.fromkeys((Op.SHEAR_X, Op.SHEAR_Y, Op.TRANSLATE_X, Op.TRANSLATE_Y), share)
    for views, ranges in ((slice(0, 2), contrastive), (slice(3, 6), composite)):
        codes, strengths = planned.codes[:, views], planned.magnitudes[:, views]
        for op, ends in ranges.items():
            assert not unlike(strengths[codes == op], ends), op


def test_composites_ops_are_independent() -> None:
    """In one composite, in composites of other lengths, and in other epochs, whose first operation is shown."""
    counts = draw(ViewPlan(lengths=(1,)), 14_000).composition[0].sum(0)
    assert abs(counts - 1000.0).max() < 5 * np.sqrt(1000)  # every one equally often
    first, second = draw(ViewPlan(), 20_000), draw(ViewPlan(), 20_000, epoch=1)
    drawn = [first.codes[:, 3, 0], *first.codes[:, 4, :2].T, *first.codes[:, 5, :3].T, second.codes[:, 3, 0]]
    for one, other in combinations(drawn, 2):
        together = np.histogram2d(one, other, bins=14, range=[[0, 14]] * 2)[0]
        assert stats.chi2_contingency(together).pvalue > 1e-4


def test_views_may_have_their_own_augmentation() -> None:
    plan = ViewPlan(contrastive=(Augmentation(blur_prob=1.0), Augmentation(blur_prob=0.0, solarize_prob=1.0)))
    codes = draw(plan, 100).codes
    assert (codes[:, 0] == Op.GAUSSIAN_BLUR).any(-1).all() and not (codes[:, 1] == Op.GAUSSIAN_BLUR).any()
    assert (codes[:, 1] == Op.SOLARIZE).any(-1).all()


def test_evaluation_plan_is_the_central_crop() -> None:
    plan = ViewPlan(contrastive=(), original="center", lengths=())
    planned = draw(plan, 4, size=(256, 320))
    assert np.array_equal(planned.boxes[0, 0], [16, 48, 224, 224]) and not planned.flips.any()
    assert np.array_equal(planned.boxes, draw(plan, 4, epoch=9, size=(256, 320)).boxes)


def test_impossible_plans_are_refused() -> None:
    with pytest.raises(UserError, match="lengths"):
        ViewPlan(lengths=(0,))
    with pytest.raises(UserError, match="original"):
        ViewPlan(original="none", lengths=(1,))


@pytest.mark.parametrize("original", ["shared", "weak"])
@pytest.mark.parametrize(
    ("order", "first", "second"), [("fixed1", Op.ROTATE, Op.BRIGHTNESS), ("fixed2", Op.COLOR, Op.SHEAR_X)]
)
def test_fixed_orders_sort_what_random_ones_draw(original: str, order: ops.Order, first: Op, second: Op) -> None:
    options = {"original": original, "lengths": (1, 3, 10)}
    drawn, fixed = draw(ViewPlan(**options), 300), draw(ViewPlan(**options, order=order), 300)  # type: ignore[arg-type]
    assert np.array_equal(drawn.composition, fixed.composition) and np.array_equal(drawn.boxes, fixed.boxes)
    place = {op: at for at, op in enumerate(ops.ORDERS[order])}
    assert sorted(place) == list(ops.BASIC) and place[first] < place[second]
    composites = slice(len(fixed.codes[0]) - 3, None)
    assert np.array_equal(drawn.codes[:, : composites.start], fixed.codes[:, : composites.start])
    arrays = (drawn.codes, fixed.codes, drawn.magnitudes, fixed.magnitudes)
    for drawn_row, row, drawn_by, by in zip(*(part[:, composites].reshape(900, -1) for part in arrays), strict=True):
        assert sorted(zip(drawn_row, drawn_by, strict=True)) == sorted(zip(row, by, strict=True))
    longest = fixed.codes[:, -1]
    tails = [row[row != END][-10:] for row in longest]
    assert all([place[Op(code)] for code in tail] == sorted(place[Op(code)] for code in tail) for tail in tails)
