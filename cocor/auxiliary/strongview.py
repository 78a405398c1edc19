"""Stronger views: a composite takes the place of the second contrastive view.

The control for the augmentations of composites without more views or another loss: a step costs what the plain method's
does. The composite is that of the last of ``--lengths``, or of those whose turn it is (``--lengths-per-step``). It
becomes the first view, which with MoCo is the query, as gradient flows through queries only; the first view of the
batch becomes the second (MoCo: the key). With ``--recipe released`` the composite is made on top of a contrastive view,
and is stronger than the view it replaces.
"""

import torch
from torch import Tensor

from cocor.auxiliary.base import Auxiliary
from cocor.methods.base import Config
from loaders.batch import Batch
from loaders.errors import UserError


class StrongView(Auxiliary):
    """A composite in place of a contrastive view."""

    defaults = {"lengths": (2,)}
    composites = True

    @classmethod
    def check(cls, config: Config) -> None:
        super().check(config)
        if config.composite_size:
            raise UserError("composite_size: strongview contrasts composites with views of --image-size; leave it at 0")

    def views(self, batch: Batch) -> Tensor:
        pair = [images.movedim(1, -1) for images in (batch.composites[-1], batch.views[0])]  # stays channels-last
        return torch.stack(pair).movedim(-1, 2)
