"""List the constants of evaluations with their sources: data sets, views, probes.

Sources: [A] AugSelf's released data and evaluation code, which the paper follows; [C] CASSLE's, which adds Cars and
Aircraft, and ten crops for few shots; [K] Kornblith et al. 2019 and SimCLR, appendix B.8; [L] LooC's table; [M] MoCo's
and [S] SimSiam's linear classification code; [R] SimCLR, appendix B.5 (1 and 10 % of the labels), and SimCLR v2 (all);
[W] Wu et al. 2018 (instance discrimination); [O] the data set's authors; [own] a choice made here, where the source
ships an index file or says nothing. The paper calls every metric top-1; both are reported.
"""

from dataclasses import dataclass
from typing import Literal

from cocor.eval.crops import Crop
from loaders.views.plan import Filter

Metric = Literal["top1", "class-mean"]
Recipe = Literal["moco", "simsiam"]

# Full-batch probe [A, K]: 45 penalties, equally spaced in their logarithm.
GRID = -6, 5, 45
# k-NN [W]: k = 200, T = 0.07; smaller k [own] as the bank allows.
KNN_K = 1, 5, 10, 20, 100, 200
KNN_TEMPERATURE = 0.07
# n-shot [L]: 5 and 10 images a class; five draws [own], since the source states none.
SHOTS, SHOT_SEEDS = (5, 10), 5
# N-way tasks [A, table 2]: 5 ways, 1 and 5 shots, 16 queries a class, 2,000 tasks; liblinear's C = 1.
WAYS, WAY_SHOTS, WAY_QUERIES, TASKS = 5, (1, 5), 16, 2000
CALTECH_SPLIT = 25, 5  # images a class to learn from and to validate on [A]
RANDOM_CROP_SCALE = 0.08, 1.0  # of the SGD probes' training views: torchvision's RandomResizedCrop(224) [M, S]


@dataclass(frozen=True)
class View:
    """Crop of :mod:`cocor.eval.crops` that a probe sees, and filter of its resize."""

    crop: Crop
    filter: Filter
    source: str


_CORNERED = View("full", "bicubic", "[A, K] Resize(224, bicubic), CenterCrop(224)")
_CENTRAL = "Resize(256), CenterCrop(224), bilinear"

VIEWS: dict[str, View] = {
    "lbfgs": _CORNERED,
    "moco": View("central", "bilinear", f"[M] {_CENTRAL}; learns from RandomResizedCrop(224), flip"),
    "simsiam": View("central", "bilinear", f"[S] {_CENTRAL}; learns from RandomResizedCrop(224), flip"),
    "knn": View("central", "bilinear", f"[W] {_CENTRAL}; as the k-NN while training"),
    "fewshot": _CORNERED,
    "retrieval": View("full", "bicubic", "[own] the linear probe's, so that both share cached features"),
    "neighbours": View("full", "bicubic", "[own] the linear probe's, so that both share cached features"),
    "embed": View("full", "bicubic", "[own] the linear probe's, so that both share cached features"),
    "spectrum": View("full", "bicubic", "[own] the linear probe's, so that both share cached features"),
    "transfer": _CORNERED,
    "finetune": View("central", "bilinear", f"[R] {_CENTRAL}; learns from RandomResizedCrop(224), flip"),
    "invariance": View("full", "bilinear", "[own] the whole image, so that views differ in what is measured only"),
    "consistency": View("full", "bilinear", "not in use: random resized crops and composites, drawn as in training"),
}


@dataclass(frozen=True)
class SgdSettings:
    """Recipe of an SGD probe.

    ``steps_at``: epochs at which the learning rate falls to a tenth; empty: cosine to 0. ``trust`` 0: no LARS.
    """

    lr: float
    batch_size: int
    epochs: int
    steps_at: tuple[int, ...] = ()
    trust: float = 0.0
    momentum: float = 0.9


RECIPES: dict[Recipe, SgdSettings] = {
    "moco": SgdSettings(lr=30.0, batch_size=256, epochs=100, steps_at=(60, 80)),  # [M]; no decay
    "simsiam": SgdSettings(lr=1.6, batch_size=4096, epochs=90, trust=0.001),  # [S]: 0.1 * 4096 / 256, LARS, no decay
}


@dataclass(frozen=True)
class FinetuneRecipe:
    """Recipe of fine-tuning [R]: SGD with Nesterov momentum, no warm-up, no decay, ``lr`` x batch / 256 for all layers.

    Batch 256 instead of 4096, and a cosine to 0 [own].
    """

    fractions: tuple[float, ...] = (1.0, 0.1, 0.01)
    lr: float = 0.05
    momentum: float = 0.9

    def epochs(self, fraction: float) -> int:
        """Return the epochs for this share of the labels."""
        return 60 if fraction <= 0.01 else 30


FINETUNE = FinetuneRecipe()


@dataclass(frozen=True)
class Protocol:
    """Split of a complete data set in numbers of images (0: not fixed), and metric.

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
    """Return the protocol of a folder of one's own."""
    source = "10 % of every class held out where there is no val folder"
    return Protocol(name, name, 0, 0, 0, 0, 0, "top1", source)
