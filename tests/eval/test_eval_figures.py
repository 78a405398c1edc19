"""The pictures of an evaluation can be read: names hide nothing, ticks do not overlap, targets are named."""

from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.axes import Axes

from cocor.eval import figures
from cocor.eval.probes.consistency import Consistency
from cocor.eval.probes.fewshot import ShotResult
from cocor.eval.probes.spectrum import Spectrum


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Axes]:
    """The axes of what is drawn, which stay open."""
    axes: list[Axes] = []
    monkeypatch.setattr(plt, "close", lambda figure: axes.extend(figure.axes))
    return axes


@pytest.mark.parametrize("encoders", [["moco"], ["moco", "cocor"], ["moco", "cocor", "a long name, " * 5, "simsiam"]])
def test_names_of_encoders_hide_no_bars(encoders: list[str], drawn: list[Axes], tmp_path: Path) -> None:
    rows = {name: dict.fromkeys(encoders, 0.999) for name in ("CIFAR-10", "Pets", "Cars")}
    figures.draw_table(tmp_path / "t.png", rows, "probes")
    (axes,) = drawn
    legend = axes.get_legend()
    assert legend is not None
    highest = max(text.get_window_extent().y1 for text in axes.texts)
    assert legend.get_window_extent().y0 > highest


def test_the_distance_names_its_target(drawn: list[Axes], tmp_path: Path) -> None:
    curve = {1: 0.9, 2: 0.8}
    found = [
        Consistency(name, "backbone features", targets, 8, curve, curve, curve, {"Identity": 1.0}, 0, 0, 8)
        for name, targets in (("cocor", "its MMNN"), ("plain", "the constants"))
    ]
    figures.draw_consistency(tmp_path / "both.png", found)
    figures.draw_consistency(tmp_path / "plain.png", found[1:])
    names = [axes.get_legend_handles_labels()[1] for axes in drawn]
    assert names[0] == ["similarity", "target of its MMNN"] and names[1] == ["cocor", "plain: to the constants"]
    assert names[3] == [] and names[4] == ["plain: to the constants"]


def test_the_largest_singular_value_has_place_1(drawn: list[Axes], tmp_path: Path) -> None:
    figures.draw_spectra(tmp_path / "s.svg", [Spectrum("moco", (3.0, 2.0, 1.0), 2.5, 2, 8)])
    assert "svg" in (tmp_path / "s.svg").read_text()[:200]
    assert np.array_equal(drawn[0].lines[0].get_xdata(), [1, 2, 3])


def test_a_single_draw_has_no_deviation() -> None:
    assert ShotResult(5, (0.5,), (0.25,), True).lines() == [
        "5-shot: top-1 50.00%, per class 25.00% (1 seed: no deviation)"
    ]
    assert "top-1 50.00% +- 14.14%" in ShotResult(5, (0.4, 0.6), (0.4, 0.6), True).lines()[0]
