"""Reference decoder: from image bytes to upright RGB pixels.

- The first frame of any of :data:`FORMATS`; never more than :data:`MAX_PIXELS`, nor than two gigabytes of memory.
- Turned upright by the EXIF (or XMP) orientation found in the file's header.
- 16-bit grey is scaled to 8 bits, not clipped. CMYK and YCCK become RGB the way Pillow converts them.
- Alpha, and a palette's or PNG's transparent colour, is composited on white.
- A damaged or truncated file is an error that names it, never a half-grey picture.
"""

import os
import stat
from dataclasses import dataclass
from functools import cache
from typing import BinaryIO, Protocol

import numpy as np
from PIL import ExifTags, Image, UnidentifiedImageError

from loaders.errors import UnusableImage, UserError, no_fault_of_a_file
from loaders.files import without_waiting
from loaders.text import printable

MAX_PIXELS = 178_000_000
"""A larger image is refused as a decompression bomb (Pillow's own hard limit is 178,956,970). Half as many where the
decoder takes twice the memory for each: WebP, JPEG 2000, CMYK."""

FORMATS = (
    *("JPEG", "MPO", "PNG", "WEBP", "AVIF", "GIF", "BMP", "DIB", "TIFF", "PPM", "JPEG2000", "TGA", "ICO", "PCX", "SGI"),
)
"""The only formats that Pillow may try. Of its others, an EPS file is a program, which Ghostscript would run."""

_BAND_PIXELS = 1 << 20  # colours are converted in bands of so many, so that no large image is held three times
_EIGHT_BITS = ((np.arange(1 << 16) * 255 + 32767) // 65535).astype(np.uint8)  # of 16

_TURNS = ("FLIP_LEFT_RIGHT", "ROTATE_180", "FLIP_TOP_BOTTOM", "TRANSPOSE", "ROTATE_270", "TRANSVERSE", "ROTATE_90")
_UPRIGHT = {orientation: Image.Transpose[turn] for orientation, turn in enumerate(_TURNS, start=2)}
_JPEG = ("JPEG", "MPO")


class ImageFault(Exception):
    """Why a file is not a usable image; the caller adds the file's name."""


@dataclass(frozen=True)
class Header:
    """What an image's header says.

    ``plain``: any correct decoder gives the pixels of :func:`decode`, unless it reads off-standard EXIF in another way,
    which :mod:`loaders.datasets.file_reader` sees; ``upright_jpeg``: even one that reads only JPEG and ignores the
    orientation tag does.
    """

    height: int
    width: int
    plain: bool
    upright_jpeg: bool = False


class EncodedImage(Protocol):
    """An image of a data set, small enough to be sent to another process."""

    def decode(self) -> Image.Image:
        """Decode to upright RGB of the data set's size. Raises :class:`UnusableImage`."""
        ...


@dataclass(frozen=True)
class ImageFile:
    """A file, and the size (width, height) of its image when the data set was opened."""

    path: str
    size: tuple[int, int]

    def decode(self) -> Image.Image:
        image = decode(self.path)
        if image.size != self.size:
            width, height = self.size
            raise UnusableImage(
                f"{printable(self.path)}: has {image.width} x {image.height} pixels, and had {width} x {height} when "
                "the data set was opened; leave files alone while they are in use"
            )
        return image


def decode(path: str | os.PathLike[str]) -> Image.Image:
    """Decode the image at ``path``, upright, mode RGB.

    Raises UnusableImage if the file is missing, damaged or no image; UserError if this process has too many open files
    or too little memory. Both name the file.
    """
    try:
        with open(path, "rb", opener=without_waiting) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise ImageFault("not a regular file")
            return decode_file(file)
    except (OSError, ImageFault) as fault:
        if isinstance(fault, OSError) and no_fault_of_a_file(fault):
            remedy = "raise the limit (ulimit -n 8192) or lower --workers and --batch-size"
            raise UserError(f"{printable(path)}: {fault.strerror}; {remedy}") from fault
        raise UnusableImage(
            f"{printable(path)}: {describe(fault)}; repair or remove it (cocor-prep finds such files)"
        ) from fault


def decode_file(file: BinaryIO) -> Image.Image:
    """Decode the image in ``file``, upright, mode RGB. Raises :class:`ImageFault`."""
    with _open(file) as image:
        turn = _UPRIGHT.get(orientation_of(image))
        try:
            image.load()
            upright = image if turn is None else image.transpose(turn)
            return _to_rgb(upright)
        except ImageFault:
            raise
        except MemoryError:
            raise ImageFault(f"not enough memory for its {image.width} x {image.height} pixels") from None
        except Exception as fault:  # Pillow's plugins raise nearly anything on damaged data
            raise ImageFault(f"truncated or damaged image ({_first_line(fault)})") from fault


def read_header(file: BinaryIO) -> Header:
    """Read upright size and kind of the image in ``file``. Raises :class:`ImageFault`."""
    with _open(file) as image:
        orientation = orientation_of(image)
        width, height = image.size[::-1] if orientation >= 5 else image.size
        jpeg = image.format in _JPEG
        alike = orientation > 0 if jpeg else image.format == "PNG" and orientation == 1
        plain = alike and _has_plain_pixels(image)
        return Header(height, width, plain, upright_jpeg=plain and jpeg and orientation == 1)


def _open(file: BinaryIO) -> Image.Image:
    try:
        image = Image.open(file, formats=_formats())
    except UnidentifiedImageError:
        empty = file.seek(0, os.SEEK_END) == 0
        raise ImageFault("an empty file" if empty else "not an image of any known kind") from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as fault:
        raise ImageFault(_first_line(fault)) from None
    except Exception as fault:  # as in decode_file
        raise ImageFault(f"truncated or damaged header ({_first_line(fault)})") from fault
    heavy = image.format in ("WEBP", "JPEG2000") or image.mode == "CMYK"
    limit = MAX_PIXELS // 2 if heavy else MAX_PIXELS
    if image.width * image.height > limit:
        raise ImageFault(f"{image.width} x {image.height} pixels are more than the limit of {limit:,}")
    if image.width < 1 or image.height < 1:
        raise ImageFault("an image without pixels")
    return image


@cache
def _formats() -> list[str]:
    """List those of FORMATS that this build of Pillow reads."""
    Image.init()
    return [name for name in FORMATS if name in Image.OPEN]


def orientation_of(image: Image.Image) -> int:
    """Read the header's orientation, 1 to 8; 0 where it is unreadable."""
    if image.format == "TIFF":  # Pillow turns these itself, in the header's size as well
        return 1
    try:
        # The base class's method: PNG's own would decode the pixels to look for EXIF behind them.
        value = Image.Image.getexif(image).get(ExifTags.Base.Orientation, 1)
    except Exception:
        return 0
    return value if isinstance(value, int) and 1 <= value <= 8 else 0


def _has_plain_pixels(image: Image.Image) -> bool:
    if image.mode not in ("L", "RGB") or image.has_transparency_data:
        return False
    if image.format == "PNG" and ("icc_profile" in image.info or image.info.get("srgb", 0) > 3):
        return False  # libpng, by which DALI decodes, prints a warning about many of these, without a name
    if image.format in _JPEG:
        components = getattr(image, "layer", None) or [(1,)]
        return image.info.get("adobe_transform") != 0 and components[0][0] != ord("R")  # else stored as RGB
    tiles = getattr(image, "tile", None) or [(None, None, None, "")]
    return tiles[0][3] in ("L", "RGB")  # not 16 bits a channel


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode == "F":
        raise ImageFault("floating-point pixels have no defined range; convert the file to 8 or 16 bits")
    if image.mode == "RGB" and not image.has_transparency_data:
        return image
    width, height = image.size
    rows = max(1, _BAND_PIXELS // width)
    if rows >= height:
        return _band_to_rgb(image)
    rgb = Image.new("RGB", image.size)
    for top in range(0, height, rows):
        rgb.paste(_band_to_rgb(image.crop((0, top, width, min(top + rows, height)))), (0, top))
    return rgb


def _band_to_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):
        return _scale_16_bits(np.asarray(image))
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert("RGB")


def _scale_16_bits(grey: np.ndarray) -> Image.Image:
    if grey.min() < 0 or grey.max() > 65535:
        raise ImageFault("32-bit pixels have no defined range; convert the file to 8 or 16 bits")
    return Image.fromarray(_EIGHT_BITS[grey]).convert("RGB")


def describe(fault: Exception) -> str:
    """Say what is wrong, in one line without the file's name."""
    return (isinstance(fault, OSError) and fault.strerror) or _first_line(fault)


def _first_line(fault: BaseException) -> str:
    return next(iter(str(fault).splitlines()), "") or type(fault).__name__
