"""Lists of classes that make a subset: ImageNet-100's, which ships with cocor, or a text file with one class a line."""

from importlib import resources
from pathlib import Path

from loaders.datasets.labels import read_lines
from loaders.errors import UserError
from loaders.text import printable

SHIPPED = {"imagenet100": "imagenet100.txt"}


def read_classes(name: str) -> list[str]:
    """The classes of the shipped list ``name``, or of the file of that name: the first word of every line.

    Raises :class:`UserError` naming file and line.
    """
    if name in SHIPPED:
        text = resources.files("loaders.prep").joinpath(SHIPPED[name]).read_text()
        return [line for line in text.split("\n") if line and not line.startswith("#")]
    if not Path(name).is_file():
        raise UserError(f"{printable(name)}: no such list of classes; name a text file, or {', '.join(SHIPPED)}")
    line_of: dict[str, int] = {}
    for number, line in read_lines(Path(name)):
        wanted = line.split()[0]
        if wanted in line_of:
            raise UserError(
                f"{printable(name)}:{number}: {printable(wanted)} is listed already in line {line_of[wanted]}"
            )
        line_of[wanted] = number
    if not line_of:
        raise UserError(f"{printable(name)}: lists no classes; write one a line")
    return list(line_of)
