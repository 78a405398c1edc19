"""AugSelf: predict from the features of two views how their augmentations differ.

Source: Lee et al. 2021 ("Improving Transferability of Representations via Augmentation-Aware Self-Supervision"), eq. 2
and section 3: ``L = L_method + weight * sum_t L_t(phi_t(f(v1), f(v2)), omega_t(v1) - omega_t(v2))`` over the targets t,
crop and colour by default, as in the paper. Each phi_t has three layers of 512 units. As in the authors' code, which
settles what the paper leaves open, both orders of the views count, and:

    crop    difference of centre and size as shares of the image, in the coordinates of the first view, which may be
            mirrored; squared error of tanh(phi)
    color   difference of the factors over their ranges, hue included; squared error of tanh(phi)
    blur    difference of the sigmas in pixels, 0 without blur; here over the largest, so that tanh can reach it
    flip    whether both views are flipped or neither; cross-entropy
    grey    the same for grey, which the authors leave out

With ``--auxiliary-pairs composites`` the two views are the original and a composite, and the target is the composition
vector, 14 counts as shares of the longest length; squared error of tanh(phi).

The gradient reaches the backbone through both features. MoCo is the exception, as there: its second view passes without
gradient. (Theirs takes the key encoder's features; here it is the query encoder's, as keys are shuffled over ranks.)
Their weight is 1 on STL-10 and 0.5 on ImageNet-100; here it is ``--auxiliary-weight``, 1.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cocor.auxiliary.base import PairAuxiliary, view_features
from cocor.auxiliary.heads import perceptron
from cocor.methods import method_class
from cocor.methods.base import Config, Method, batch_statistics_only, feature_size, precise
from loaders.batch import Batch
from loaders.views.ops import BASIC
from loaders.views.parameters import PARAMETERS

_HIDDEN = 512
_WIDTHS = {"crop": 4, "color": 4, "blur": 1, "flip": 1, "grey": 1, "composition": len(BASIC)}
_BINARY = ("flip", "grey")
_PLACE = {name: place for place, name in enumerate(PARAMETERS)}


class AugSelf(PairAuxiliary):
    """Predict differences of augmentations from pairs of features."""

    options = ("auxiliary_weight", "auxiliary_pairs", "augself_targets")
    view_parameters = True

    ranges: Tensor

    def __init__(self, config: Config, method: Method) -> None:
        super().__init__(config, method)
        targets = ("composition",) if self.of_composites else config.augself_targets
        width = 2 * feature_size(method.backbone)
        self.heads = nn.ModuleDict({name: perceptron(width, _HIDDEN, _HIDDEN, _WIDTHS[name]) for name in targets})
        self.longest, self.sigma = max(config.lengths), config.blur_sigma[1]
        jitter = (config.brightness, config.contrast, config.saturation)
        ranges = [1.0 + strength - max(0.0, 1.0 - strength) for strength in jitter] + [2.0 * config.hue]
        self.register_buffer("ranges", torch.tensor([span or 1.0 for span in ranges]), persistent=False)

    @classmethod
    def cost(cls, config: Config) -> float:
        if cls.in_composites(config):
            return super().cost(config)
        return 2.0 - method_class(config.method).views_with_gradient(config)

    def loss(self, method: Method, batch: Batch, features: Sequence[Tensor]) -> Tensor:
        if self.of_composites:
            with batch_statistics_only(method.backbone):
                original = method.backbone(batch.original)
                pairs = [torch.cat([original, method.backbone(images)], 1) for images in batch.composites]
            shares = batch.composition.flatten(0, 1) / self.longest
            return _error("composition", self.heads["composition"](torch.cat(pairs)), shares)
        assert batch.parameters is not None
        first, second = view_features(method, batch, features, gradient=False)
        both = torch.cat([torch.cat([first, second], 1), torch.cat([second, first], 1)])
        one, other = batch.parameters
        errors = [
            _error(name, head(both), torch.cat([self.difference(name, one, other), self.difference(name, other, one)]))
            for name, head in self.heads.items()
        ]
        return torch.stack(errors).sum()

    def difference(self, name: str, first: Tensor, second: Tensor) -> Tensor:
        """Return what is predicted, (B, width), of the parameters (B, 16) of two views."""
        if name in _BINARY:
            same = first[:, _PLACE[name]] == second[:, _PLACE[name]]
            return same[:, None].to(first.dtype)
        change = first - second
        if name == "blur":
            return change[:, _PLACE["blur"], None] / self.sigma
        if name == "color":
            return change[:, _PLACE["brightness"] : _PLACE["hue"] + 1] / self.ranges
        mirrored = 1.0 - 2.0 * first[:, _PLACE["flip"]]
        y, x, height, width = change[:, :4].unbind(1)
        return torch.stack([y, x * mirrored, height, width], 1)


def _error(name: str, prediction: Tensor, target: Tensor) -> Tensor:
    prediction = precise(prediction)
    target = target.to(prediction.dtype)
    if name in _BINARY:
        return F.binary_cross_entropy_with_logits(prediction, target)
    return F.mse_loss(prediction.tanh(), target)
