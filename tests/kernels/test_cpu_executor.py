"""The CPU executor around the ops: crops, flips, layouts, threads, memory and normalisation."""

import pickle
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from helpers.pictures import grey_levels_on_cpu, photographs
from numpy.typing import NDArray

from loaders.kernels import pillow
from loaders.kernels.cpu import CpuExecutor
from loaders.kernels.lower import lower
from loaders.views.plan import ViewLayout, ViewPlan

MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]


def planned(size: int, batch: int, **settings: Any) -> tuple[ViewLayout, list[NDArray[Any]], NDArray[np.float32]]:
    """A layout, the executor's inputs and the magnitudes; crops are different windows of the photographs."""
    plan = ViewPlan(size=size, seed=5, **settings)
    drawn = plan.draw(2, np.arange(batch), np.full((batch, 2), 100, np.int32))
    pictures = photographs(size + 8)
    crops = np.empty((batch, plan.layout.crops, size, size, 3), np.uint8)
    for b in range(batch):
        for c in range(plan.layout.crops):
            crops[b, c] = pictures[b % len(pictures), c : c + size, b % 8 : b % 8 + size]
    params = lower(drawn.codes, drawn.magnitudes, size)
    return plan.layout, [crops, drawn.flips, drawn.codes, params], drawn.magnitudes


@pytest.mark.parametrize("settings", [{}, {"original": "weak", "originals": 2}, {"lengths": (1, 5)}])
def test_views_equal_pillow_and_torchvision(settings: dict[str, Any]) -> None:
    layout, inputs, magnitudes = planned(33, 12, **settings)
    views = CpuExecutor(layout, 33, MEAN, STD)(*inputs)
    crops, flips, codes, _ = inputs
    assert flips.any() and not flips.all()
    for t, c in enumerate(layout.crop_of_view):
        for b in range(len(crops)):
            if 16 in codes[b, t]:  # GaussianBlur may differ by one grey level
                continue
            image = pillow.view(crops[b, c], bool(flips[b, c]), codes[b, t], magnitudes[b, t])
            assert (views[t, b] == pillow.normalise(image, MEAN, STD).permute(1, 2, 0).numpy()).all()


def test_threads_do_not_change_bits() -> None:
    layout, inputs, _ = planned(40, 11)
    expected = CpuExecutor(layout, 40, MEAN, STD, threads=1)(*inputs)
    executor = CpuExecutor(layout, 40, MEAN, STD, threads=3)
    with ThreadPoolExecutor(4) as pool:  # several callers at once share the scratch memory
        for views in pool.map(lambda _: executor(*inputs), range(8)):
            assert (views == expected).all()
    executor.close()
    assert (executor(*inputs) == expected).all()
    executor.close()


def test_outputs_are_written_and_inputs_kept() -> None:
    layout, inputs, _ = planned(32, 3)
    executor, before = CpuExecutor(layout, 32, MEAN, STD), [a.copy() for a in inputs]
    expected = executor(*inputs)
    out, array = torch.empty(expected.shape), np.empty_like(expected)
    assert executor(*map(torch.from_numpy, inputs), out=out) is out and (out.numpy() == expected).all()
    assert executor(*inputs, out=array) is array and (array == expected).all()
    assert all((a == b).all() for a, b in zip(inputs, before, strict=True))
    values = grey_levels_on_cpu(layout, 32, inputs)
    for c in range(3):
        assert (executor.normalise[c][values[..., c]] == expected[..., c]).all()


def test_wrong_shapes_and_types_are_refused() -> None:
    layout, inputs, _ = planned(32, 4)
    executor = CpuExecutor(layout, 32, MEAN, STD)
    for k in range(4):
        wrong = list(inputs)
        wrong[k] = wrong[k][:, :-1]
        with pytest.raises(ValueError, match="expected"):
            executor(*wrong)
        wrong[k] = inputs[k].astype(np.float32)
        with pytest.raises(ValueError, match="is float32"):
            executor(*wrong)
    with pytest.raises(ValueError, match="out is float64"):
        executor(*inputs, out=np.empty((len(layout.crop_of_view), 4, 32, 32, 3), np.float64))


def test_executors_can_be_pickled() -> None:
    layout, inputs, _ = planned(16, 2)
    executor = CpuExecutor(layout, 16, MEAN, STD, threads=2)
    copy = pickle.loads(pickle.dumps(executor))
    assert (copy(*inputs) == executor(*inputs)).all()
    assert copy(*[a[:0] for a in inputs]).shape == (layout.views, 0, 16, 16, 3)  # of an empty batch
    executor.close()
    copy.close()
