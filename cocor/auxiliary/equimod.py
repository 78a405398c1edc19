"""EquiMod: predict where an augmentation moves an image's embedding.

Source: Devillers & Lefort 2023 ("EquiMod: An Equivariance Module to Improve Visual Instance Discrimination"), section 3
and the authors' code. An equivariant projector embeds the original x as y and a view t(x) as y_t; from y and a
projection of t's parameters a linear predictor u makes ``y^_t = u(y, t)``. The loss is NT-Xent, temperature 0.2, with
y_t and y^_t as the pairs, and all y_t and y^_t of the batch as negatives, with weight 1.

    views        x is the central crop of the image, t the parameters of crop, flip, jitter, grey and blur of the
                 contrastive views, order of the jitter included (16 numbers)
    composites   x is CoCor's original, t the composition vector (14 counts): a composite is t(x) and nothing else

Parameters are standardised, as there, but by statistics of the batch. Theirs have the crop in pixels, not in shares of
the image, and whether there was jitter and blur at all. All passes have a gradient; each has batch statistics of its
own for the backbone's BatchNorm, those of the heads cover all images of all ranks together.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from cocor.auxiliary.base import PairAuxiliary, view_features
from cocor.auxiliary.heads import nt_xent, perceptron
from cocor.methods import method_class
from cocor.methods.base import Config, Method, batch_statistics_only, feature_size, precise
from loaders.batch import Batch
from loaders.errors import UserError
from loaders.views.ops import BASIC
from loaders.views.parameters import PARAMETERS

_HIDDEN, _DIM = 2048, 128


class EquiMod(PairAuxiliary):
    """Predict embeddings of augmented images from those of the originals."""

    options = ("auxiliary_weight", "auxiliary_pairs", "auxiliary_temperature")
    view_parameters = True
    original = True

    def __init__(self, config: Config, method: Method) -> None:
        super().__init__(config, method)
        count = len(BASIC) if self.of_composites else len(PARAMETERS)
        self.projector = perceptron(feature_size(method.backbone), _HIDDEN, _HIDDEN, _DIM, last_norm=True)
        standardise = nn.BatchNorm1d(count, affine=False)
        self.augmentation = nn.Sequential(standardise, nn.Linear(count, _DIM, bias=False), nn.BatchNorm1d(_DIM))
        self.predictor = perceptron(2 * _DIM, _DIM, last_norm=True)

    @classmethod
    def check(cls, config: Config) -> None:
        super().check(config)
        if not cls.in_composites(config) and config.consistency != "none":
            raise UserError(
                "auxiliary: equimod compares views with the whole image, where CoCor has a random crop; use "
                "--consistency none or --auxiliary-pairs composites"
            )

    @classmethod
    def cost(cls, config: Config) -> float:
        if cls.in_composites(config):
            return super().cost(config)
        return 3.0 + 3.0 * (2 - method_class(config.method).views_with_gradient(config))

    def loss(self, method: Method, batch: Batch, features: Sequence[Tensor]) -> Tensor:
        with batch_statistics_only(method.backbone):
            original = method.backbone(batch.original)
            if self.of_composites:
                augmented = [method.backbone(images) for images in batch.composites]
                parameters = batch.composition
            else:
                assert batch.parameters is not None
                augmented, parameters = view_features(method, batch, features, gradient=True), batch.parameters
        source, *moved = self.projector(torch.cat([original, *augmented])).chunk(1 + len(augmented))
        embedded = torch.cat(moved)
        change = self.augmentation(parameters.flatten(0, 1).to(precise(original).dtype))
        predicted = self.predictor(torch.cat([source.repeat(len(moved), 1), change], 1))
        return nt_xent(embedded, predicted, self.temperature, self.ranks)
