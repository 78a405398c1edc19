"""Draw pictures in one style: small panels, written whole or not at all.

matplotlib is an extra (``pip install matplotlib``) and loads only when something is drawn.
"""

import importlib.util
import logging
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loaders.errors import UserError
from loaders.files import replacing
from loaders.text import printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH, _HEIGHT, _DPI = 4.8, 3.8, 110
_LEGEND, _TITLE = 36, 9  # characters per line of a legend; per inch of a panel's width, of a title
# Fonts for characters that matplotlib's own lacks, above all Chinese, Japanese and Korean; used where installed.
_FONTS = ("Noto Sans CJK JP", "Noto Sans CJK SC", "Source Han Sans", "WenQuanYi Zen Hei", "Droid Sans Fallback",
          "IPAexGothic", "Hiragino Sans", "PingFang SC", "Yu Gothic", "Microsoft YaHei", "Malgun Gothic",
          "Arial Unicode MS", "Unifont")  # fmt: skip
_log = logging.getLogger(__name__)


def check_picture(path: Path) -> None:
    """Raise UserError if matplotlib is missing, or draws no pictures such as ``path``."""
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise UserError(f"{path}: pictures are .png, .svg or .pdf")
    if importlib.util.find_spec("matplotlib") is None:
        raise UserError("pictures need matplotlib: pip install matplotlib")


@contextmanager
def panels(path: Path, count: int, columns: int | None = None, width: float = WIDTH) -> Iterator[Sequence["Axes"]]:
    """Yield ``count`` axes of a figure, written to ``path`` when the block ends.

    Each is ``width`` inches wide, at most ``columns`` in a row. UserError as in :func:`check_picture`.
    """
    check_picture(path)
    import matplotlib.font_manager

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    installed = set(matplotlib.font_manager.fontManager.get_font_names())
    matplotlib.rcParams["font.family"] = ["DejaVu Sans", *(font for font in _FONTS if font in installed)]
    columns = min(columns or count, count)
    rows = -(-count // columns)
    size = width * columns, _HEIGHT * rows
    figure, axes = plt.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False)
    try:
        flat = list(axes.flat)
        for unused in flat[count:]:
            unused.set_visible(False)
        for panel in flat:
            panel.grid(alpha=0.3)
            panel.spines[["top", "right"]].set_visible(False)
        yield flat[:count]
        for panel in flat[:count]:
            panel.set_title(wrapped(panel.get_title(), round(_TITLE * width)))
        with replacing(path) as temporary:
            _save(figure, temporary, path)
    finally:
        plt.close(figure)


def _save(figure: "Figure", temporary: Path, path: Path) -> None:
    """Save ``figure``, with one warning for all characters that no font has."""
    with warnings.catch_warnings(record=True) as caught:
        figure.savefig(temporary, dpi=_DPI, format=path.suffix[1:])
    lacking: dict[str, None] = {}
    for warning in caught:
        glyph = re.match(r"Glyph (\d+)", str(warning.message))
        if glyph:
            lacking[chr(int(glyph[1]))] = None
        else:
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
    if lacking:
        some = printable("".join(lacking)[:20])
        _log.warning(f"{path}: boxes stand for {len(lacking)} characters of its names ({some}) that no font here has; "
                     "install one that has them, such as Noto Sans CJK")  # fmt: skip


def end_at_100(axes: "Axes") -> None:
    """End an axis of percentages at 100, where margins would take it further."""
    axes.set_ylim(top=min(100, axes.get_ylim()[1]))


def shown(name: str) -> str:
    """Escape ``name``: dollars begin formulas, underscores at the start hide legends."""
    text = printable(name).replace("$", r"\$")
    return f" {text}" if text.startswith("_") else text


def wrapped(text: str, most: int) -> str:
    """Break ``text`` into lines of at most ``most`` characters, after punctuation."""
    lines, rest = [], text
    while len(rest) > most:
        cut = 1 + max(rest.rfind(mark, 1, most) for mark in " -_/,.")
        cut = cut if cut > most // 3 else most
        cut -= rest[cut - 1] == "\\"  # keep the backslash with the dollar that it escapes
        lines.append(rest[:cut].rstrip())
        rest = rest[cut:]
    return "\n".join([*lines, rest])


def legend_text(name: str) -> str:
    return wrapped(name, _LEGEND)


def legend(axes: "Axes", **options: Any) -> None:
    """Draw a small legend, if any curve has a label; long labels take several lines."""
    handles, names = axes.get_legend_handles_labels()
    if handles:
        lines = [legend_text(name) for name in names]
        axes.legend(handles, lines, fontsize=8, framealpha=0.8, edgecolor="none", **options)
