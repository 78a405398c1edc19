"""How each data set of the paper is evaluated: split sizes, seeds and metric, each with its source, in one table.

Sources: [A] AugSelf's released data code, which the paper follows; [C] CASSLE's, which adds Cars and Aircraft; [K] the
metric of Kornblith et al. 2019 and SimCLR, appendix B.8; [O] the split of the data set's authors; [own] a choice made
here, because the source ships an index file or says nothing. The paper calls every metric top-1; both are reported.
"""

from dataclasses import dataclass
from typing import Literal

Metric = Literal["top1", "class-mean"]


@dataclass(frozen=True)
class Protocol:
    """``train`` + ``val`` images to learn from, ``test`` to test on, in the complete data set (0: not fixed).

    ``seed`` draws the validation images from the training images as ``torch.utils.data.random_split`` does; None where
    the authors fixed them. ``stratified`` draws equal shares of all classes instead.
    """

    name: str
    title: str
    classes: int
    train: int
    val: int
    test: int
    seed: int | None
    metric: Metric
    source: str


_ROWS = (
    Protocol("cifar10", "CIFAR-10", 10, 45000, 5000, 10000, 43, "top1", "[A] split, [K] metric"),
    Protocol("cifar100", "CIFAR-100", 100, 45000, 5000, 10000, 44, "top1", "[A] split, [K] metric"),
    Protocol("cub200", "CUB-200", 200, 4994, 1000, 5794, 0, "top1", "[O] test; [A] size of val, seed [own]"),
    Protocol("caltech101", "Caltech-101", 101, 2525, 505, 5647, 0, "class-mean", "[A] 25 + 5 a class, seed [own]; [K]"),
    Protocol("sun397", "SUN397", 397, 15880, 3970, 19850, 0, "top1", "[O] partition 01; [A] sizes, seed [own]; [K]"),
    Protocol("food101", "Food-101", 101, 68175, 7575, 25250, 42, "top1", "[A] split, [K] metric"),
    Protocol("flowers102", "Flowers-102", 102, 1020, 1020, 6149, None, "class-mean", "[O] split, [K] metric"),
    Protocol("pets", "Oxford-IIIT Pets", 37, 2940, 740, 3669, 49, "class-mean", "[A] split, [K] metric"),
    Protocol("aircraft", "FGVC Aircraft", 100, 3334, 3333, 3333, None, "class-mean", "[O] split, [C], [K] metric"),
    Protocol("cars", "Stanford Cars", 196, 7000, 1144, 8041, 51, "top1", "[C] split, [K] metric"),
    Protocol("imagenet100", "ImageNet-100", 100, 0, 0, 5000, 0, "top1", "classes of CMC; 10 % val [own]"),
    Protocol("imagenet1k", "ImageNet-1K", 1000, 0, 0, 50000, 0, "top1", "[O] test; 1 % val [own]"),
)

PROTOCOLS: dict[str, Protocol] = {row.name: row for row in _ROWS}
TRANSFER: tuple[str, ...] = tuple(name for name in PROTOCOLS if not name.startswith("imagenet"))  # the paper's ten

VAL_SHARE = {"imagenet1k": 0.01}
DEFAULT_VAL_SHARE = 0.1


def of_folder(name: str) -> Protocol:
    """The protocol of a folder of one's own."""
    source = "10 % of every class held out where there is no val folder"
    return Protocol(name, name, 0, 0, 0, 0, 0, "top1", source)
