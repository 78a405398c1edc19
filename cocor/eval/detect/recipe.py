"""Flags of ``cocor-eval detect`` and the recipe of fine-tuning that they mean."""

import argparse
from dataclasses import dataclass, replace
from pathlib import Path

from loaders.arguments import above_zero, image_size, positive, seed, workers
from loaders.errors import UserError

_FIRST_RATE = 0.001  # of the warm-up, as a share of the rate


@dataclass(frozen=True)
class Recipe:
    """SGD with linear warm-up to ``lr``, divided by ten at each of ``drops``.

    All are in iterations. ``min_size``: smallest and largest shortest side of the images in pixels. ``regions``: boxes
    of an image from which the head learns, a quarter of them on objects.
    """

    iterations: int
    warmup: int
    drops: tuple[int, int]
    min_size: tuple[int, int]
    batch_size: int = 16
    lr: float = 0.02
    regions: int = 512
    seed: int = 0

    def rate(self, iteration: int) -> float:
        """Return the learning rate of an iteration."""
        warm = min(1.0, _FIRST_RATE + (1 - _FIRST_RATE) * iteration / max(1, self.warmup))
        return self.lr * warm * 0.1 ** sum(iteration >= drop for drop in self.drops)

    def shortened(self, iterations: int) -> "Recipe":
        """Return the recipe of other ``iterations``, whose warm-up and drops scale alike."""
        share = iterations / self.iterations
        drops = round(self.drops[0] * share), round(self.drops[1] * share)
        return replace(self, iterations=iterations, warmup=round(self.warmup * share), drops=drops)


RECIPES = {  # MoCo's configurations for Detectron2: pascal_voc_R_50_C4_24k; COCO as there, for Detectron2's 1x
    "voc0712": Recipe(24_000, 100, (18_000, 22_000), (480, 800)),
    "coco": Recipe(90_000, 1000, (60_000, 80_000), (640, 800)),
}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``detect`` but those that choose the encoder."""
    parser.add_argument("--dataset", choices=list(RECIPES), required=True, help="VOC 2007 + 2012, or COCO 2017")
    parser.add_argument("--root", type=Path, required=True, metavar="DIR", help="holds VOCdevkit/, or train2017/ ...")
    kinds = "C4: the paper's; FPN: faster (default c4)"
    parser.add_argument("--detector", choices=["c4", "fpn"], default="c4", help=kinds)
    parser.add_argument("--iterations", type=positive, help="default: VOC 24000, COCO 90000 (1x)")
    parser.add_argument("--batch-size", type=positive, default=16, help="images an iteration (default 16)")
    parser.add_argument("--lr", type=above_zero, help="default: 0.02 x batch size / 16")
    sizes = "shortest side of training images, from MIN to MAX; of test images MAX (VOC 480 800, COCO 640 800)"
    parser.add_argument("--min-size", type=image_size, nargs=2, metavar=("MIN", "MAX"), help=sizes)
    boxes = "boxes of an image from which the head learns; fewer take less memory and time (default 512)"
    parser.add_argument("--regions", type=positive, default=512, help=boxes)
    parser.add_argument("--seed", type=seed, default=0, help="of weights, batches and sampled boxes (default 0)")
    every = "iterations between checkpoints, from which the same command goes on (default 1000)"
    parser.add_argument("--checkpoint-every", type=positive, default=1000, help=every)
    parser.add_argument("--on-error", choices=["stop", "skip"], default="stop", help="unusable images")
    parser.add_argument("--precision", choices=["fp32", "bf16"], help="of convolutions (default bf16 on a GPU)")
    parser.add_argument("--gpu", choices=["yes", "no"], help="default: if there is one")
    parser.add_argument("--workers", type=workers, help="processes that decode (default: one a core)")
    parser.add_argument("--output", type=Path, metavar="DIR", help="default: eval/RUN/DATASET")


def chosen_recipe(args: argparse.Namespace) -> Recipe:
    """Return the data set's recipe, as changed by flags."""
    usual = RECIPES[args.dataset]
    low, high = args.min_size or usual.min_size
    if low > high:
        raise UserError(f"--min-size {low} {high}: name the smaller side first")
    recipe = usual.shortened(args.iterations or usual.iterations)
    lr = args.lr or usual.lr * args.batch_size / usual.batch_size
    flags = {"batch_size": args.batch_size, "regions": args.regions, "seed": args.seed}
    return replace(recipe, min_size=(low, high), lr=lr, **flags)
