"""Multi-view training: composites are further positives of the method's own loss.

No paper's objective, but the control of all of them: what do the additional views give without any further idea? The
mean over composites is added to the method's loss. Each composite passes through the branch with gradient, and is
attracted to what the method has computed of the contrastive views, without gradient:

    moco            InfoNCE of the composite's query with the step's key and the queue (He et al. 2020, eq. 1)
    simsiam, byol   its prediction of the projections of both views, as in FastSiam (Pototzky et al. 2022, eq. 2), which
                    averages the targets before normalising them; here the cosines are averaged
    supcon, simclr  the loss of the composites and both views (Khosla et al. 2020, eq. 2)
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from cocor.auxiliary.base import Auxiliary, composite_passes
from cocor.methods.base import Config, Method
from loaders.batch import Batch


class MultiView(Auxiliary):
    """Composites as further positives."""

    options = ("auxiliary_weight",)
    composites = True
    by_length = True
    needs = "loss of further positives"

    @classmethod
    def fits(cls, method: type[Method]) -> bool:
        return method.further_positive is not Method.further_positive

    @classmethod
    def cost(cls, config: Config) -> float:
        return composite_passes(config)

    def loss(self, method: Method, batch: Batch, features: Sequence[Tensor]) -> Tensor:
        return torch.stack([method.further_positive(images, batch.label) for images in batch.composites]).mean()
