"""Channels of images: three or, of grey ones, one; by what they are normalised."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # options need no PyTorch
    from torch import Tensor

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
GREY_MEAN, GREY_STD = (0.449,), (0.226,)  # the means of these, for images of one channel


def luma(images: "Tensor", dim: int = -1) -> "Tensor":
    """Mix R, G and B, which ``dim`` holds, to one channel, as Pillow's L does.

    Pixels that are grey already keep their value to the bit, in every dtype.
    """
    red, green, blue = images.split(1, dim)
    return red.lerp(green, 0.587 / 0.886).lerp(blue, 0.114)
