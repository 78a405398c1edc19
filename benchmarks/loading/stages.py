"""Stages of the data path, each with what it adds to the one before."""

from typing import Literal, get_args

from loaders.views.plan import Augmentation, ViewPlan

Stage = Literal["decode", "crops", "contrastive", "composites", "step"]
STAGES: tuple[Stage, ...] = get_args(Stage)

TITLES: dict[Stage, str] = {
    "decode": "decode",  # bytes -> RGB pixels, thrown away
    "crops": "+ crops",  # three resized crops with flips: two contrastive views and the original
    "contrastive": "+ contrastive views",  # colour jitter, grey, blur
    "composites": "+ composites",  # lengths 1, 2 and 3: six views, all that training needs
    "step": "+ training step",  # MoCo + CoCor
}

PLAIN = Augmentation(jitter_prob=0.0, grayscale_prob=0.0, blur_prob=0.0)
FULL = Augmentation()


def plan_of(stage: Stage, size: int) -> ViewPlan:
    """Plan the views of a stage (``decode`` has none, and takes those of ``crops``)."""
    if stage in ("decode", "crops"):
        return ViewPlan(size, contrastive=(PLAIN, PLAIN), lengths=())
    if stage == "contrastive":
        return ViewPlan(size, lengths=())
    return ViewPlan(size)


def views_of(stage: Stage) -> int:
    """Count the views of a sample in this stage; a decoded image is none."""
    return 0 if stage == "decode" else plan_of(stage, 1).layout.views
