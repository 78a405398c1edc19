"""File names as text that survives undecodable bytes.

A file name is bytes. Inside the program it is ``str`` with surrogate escapes (``os.fsdecode``), which any name
survives; what a person or a JSON file gets to see goes through :func:`printable`. A terminal may lack characters of
text that is whole as well, so commands begin with :func:`print_everything`.
"""

import io
import os
import sys

IMAGE_SUFFIXES = frozenset(
    {"jpg", "jpeg", "jpe", "jfif", "png", "webp", "avif", "bmp", "dib", "gif", "tif", "tiff", "ppm", "pgm", "pbm"}
    | {"pnm", "jp2", "j2k", "tga", "ico", "pcx", "sgi", "img"}
)

_TEXT_SUFFIXES = frozenset({"txt", "csv", "tsv", "json", "jsonl", "xml", "yaml", "yml", "md"})


def is_text(name: str) -> bool:
    """Tell by its suffix whether a file is a list, a caption or a note, no image."""
    return name.rpartition(".")[2].lower() in _TEXT_SUFFIXES


def printable(name: str | os.PathLike[str]) -> str:
    """Escape undecodable bytes and control characters, for print and storage."""
    try:
        text = os.fsencode(name).decode("utf-8", "backslashreplace")
    except UnicodeEncodeError:  # half of a surrogate pair, as JSON can hold; no file has such a name
        text = os.fspath(name).encode("utf-8", "backslashreplace").decode()
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def counted(count: int, noun: str) -> str:
    """Return ``1 step``, ``2,000 steps``; a noun in -s, as class, takes -es."""
    return f"{count:,} {noun}{'' if count == 1 else 'es' if noun.endswith('s') else 's'}"


def print_everything() -> None:
    """Let standard streams escape what they cannot encode: ``print`` would raise."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def bare(name: str) -> str:
    """Strip the suffixes of image files, which cocor-prep's conversions may add to.

    They add ``.jpg`` to the name of an image that was no JPEG's, so ``cat/1.png`` becomes ``cat/1.png.jpg``, and both
    are ``cat/1``.
    """
    while (cut := name.rpartition("."))[2].lower() in IMAGE_SUFFIXES and cut[0].rpartition("/")[2]:
        name = cut[0]
    return name


def stays_inside(name: str) -> bool:
    """Tell whether a relative name stays inside the folder it is relative to."""
    return not name.startswith("/") and "\0" not in name and ".." not in name.split("/")
