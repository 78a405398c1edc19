"""Pictures in one style: small panels with a light grid, written whole or not at all.

matplotlib is an extra (``pip install matplotlib``) and loads only when something is drawn.
"""

import importlib.util
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cocor import atomic
from loaders.errors import UserError
from loaders.names import printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH, _HEIGHT, _DPI = 4.8, 3.8, 110


def check_picture(path: Path) -> None:
    """UserError where a picture cannot be drawn to ``path``: matplotlib is not installed, or it makes no such files."""
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise UserError(f"{path}: pictures are .png, .svg or .pdf")
    if importlib.util.find_spec("matplotlib") is None:
        raise UserError("pictures need matplotlib: pip install matplotlib")


@contextmanager
def panels(path: Path, count: int, columns: int | None = None, width: float = WIDTH) -> Iterator[Sequence["Axes"]]:
    """``count`` axes, each ``width`` inches wide, at most ``columns`` in a row, of a figure that is written to ``path``
    (.png, .svg, .pdf) when the block ends.

    Raises:
        UserError: matplotlib is not installed, or the format is none of these.
    """
    check_picture(path)
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    columns = min(columns or count, count)
    rows = -(-count // columns)
    figure, axes = plt.subplots(
        rows, columns, figsize=(width * columns, _HEIGHT * rows), layout="constrained", squeeze=False
    )
    try:
        flat = list(axes.flat)
        for unused in flat[count:]:
            unused.set_visible(False)
        for place in flat:
            place.grid(alpha=0.3)
            place.spines[["top", "right"]].set_visible(False)
        yield flat[:count]
        with atomic.replacing(path) as temporary:
            figure.savefig(temporary, dpi=_DPI, format=path.suffix[1:])
    finally:
        plt.close(figure)


def shown(name: str) -> str:
    """``name`` as text that matplotlib draws as it is: dollars would begin a formula, and a legend leaves out what
    begins with an underscore."""
    text = printable(name).replace("$", r"\$")
    return f" {text}" if text.startswith("_") else text


def legend(axes: "Axes", **options: Any) -> None:
    """A small legend, where something has a name."""
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8, framealpha=0.8, edgecolor="none", **options)
