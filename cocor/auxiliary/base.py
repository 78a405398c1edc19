"""Define the interface of an auxiliary objective, which a method is trained with.

Auxiliaries see the views of the batch, as CoCor does; none draws any. They replace CoCor's loss (``--consistency
none``) or join it. A step calls ``views`` and ``loss`` once each, with the method's own loss in between; all parameters
are trained by the encoder's optimiser and saved in checkpoints.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from cocor.methods import METHODS, method_class
from cocor.methods.base import Config, Method, batch_statistics_only
from loaders.batch import Batch
from loaders.errors import UserError


class Auxiliary(nn.Module):
    """An objective beside that of a method; this one does nothing."""

    # Literals, as they are read from the source too (cocor.methods.spec).
    defaults: dict[str, Any] = {}  # of options, where they differ from the method's
    options: tuple[str, ...] = ()  # that are for some auxiliaries only, this one among them
    composites = False  # whether it needs composites, which are rendered then
    original = False  # whether it needs the central crop, where there are no composites
    view_parameters = False  # whether it needs those of the contrastive views, which are in the batch then
    by_length = False  # whether the loss is the mean of that of each length, so that a step can take one at a time
    needs = ""  # what it takes of a method, in words

    def __init__(self, config: Config, method: Method) -> None:
        super().__init__()

    @classmethod
    def fits(cls, method: type[Method]) -> bool:
        """Tell whether it goes with ``method``, which has what it ``needs``."""
        return True

    @classmethod
    def check(cls, config: Config) -> None:
        """Raise a UserError for a method or options that do not go together with it."""
        if not cls.fits(method_class(config.method)):
            able = "|".join(method for method in METHODS if cls.fits(method_class(method)))
            why = f"{config.method} has no {cls.needs}"
            raise UserError(f"auxiliary: {config.auxiliary} goes with --method {able}; {why}")

    @classmethod
    def cost(cls, config: Config) -> float:
        """Return its forward passes an image, a backward pass being 2."""
        return 0.0

    def views(self, batch: Batch) -> Tensor:
        """Return the contrastive views (V, B, C, H, W) of the method."""
        return batch.views

    def loss(self, method: Method, batch: Batch, features: Sequence[Tensor]) -> Tensor | None:
        """Return the loss, a scalar with gradient; None if there is none.

        ``features`` (B, D) are the backbone's of the first contrastive views, of those that the method computes with
        gradient: training on them costs no pass. Called between ``method.contrastive`` and ``method.after_step``. Its
        mean over ranks must be the loss of the global batch, and the mean of its gradients that loss's gradient.
        """
        return None

    def after_step(self, method: Method) -> None:
        """Update moving averages and queues; called once per step, before the method's."""


class PairAuxiliary(Auxiliary):
    """An auxiliary of pairs: two contrastive views, or the original and a composite.

    Where it has ``composites``, always the latter.
    """

    def __init__(self, config: Config, method: Method) -> None:
        super().__init__(config, method)
        self.of_composites = self.in_composites(config)
        self.ranks, self.temperature = method.ranks, config.auxiliary_temperature

    @classmethod
    def in_composites(cls, config: Config) -> bool:
        """Tell whether the pairs are original and composite."""
        return cls.composites or config.auxiliary_pairs == "composites"

    @classmethod
    def check(cls, config: Config) -> None:
        super().check(config)
        if cls.in_composites(config) and config.recipe == "released":
            raise UserError(
                f"recipe: {config.auxiliary} needs original and composites of one crop, not those of released"
            )

    @classmethod
    def cost(cls, config: Config) -> float:
        return 3.0 + composite_passes(config)


def view_features(method: Method, batch: Batch, features: Sequence[Tensor], gradient: bool) -> list[Tensor]:
    """Complete ``features`` by those of the other contrastive views, (B, D) each.

    These take a pass each, whose ``gradient`` reaches the backbone or not.
    """
    with torch.set_grad_enabled(gradient), batch_statistics_only(method.backbone):
        return [*features, *(method.backbone(images) for images in batch.views[len(features) :])]


def composite_passes(config: Config) -> float:
    """Count the passes of an image's composites in a step, their backward passes included."""
    # A pass is taken to cost in proportion to its pixels, as it does in a convolutional network.
    pixels = (config.composite_size / config.image_size) ** 2 if config.composite_size else 1.0
    return 3.0 * (config.lengths_per_step or len(config.lengths)) * pixels
