"""Step the MMNN by the outer objective, a linear classifier's labelled loss.

Paper, eq. 4 and algorithm 1: the MMNN learns to set targets such that the encoder's step lowers the classifier's
cross-entropy; the classifier learns from the same forward pass.

How fast the MMNN learns (``--mmnn-optimiser``). Its gradient is ``eta w sum_l c_l p_l dg_l`` with the encoder's rate
eta, the loss's weight w, ``c_l <= beta / 4L`` and the products ``p_l = <grad CE, grad sim_l>``
(``cocor.objective.hypergradient``). SGD with a rate r therefore moves it by r eta w beta / 4 times the products: with
the paper's settings (eta from 0.03 to 0, w and beta 1, r 0.05), targets move by about 0.001 in a whole run.

    sgd          that, as printed and as in the authors' code
    normalised   the gradient over eta w: the same direction, as eta and w are common to all lengths; the size still
                 depends on beta, on the network and, through c, on the distance from target to similarity
    adam         Adam on the same: each step is near r times the sign of the gradient, over its noise, so that neither
                 these nor eta, w and beta matter. (Adam alone would cancel constant factors, but not follow an eta that
                 falls, nor meet its epsilon of 1e-8 with such small gradients.)
"""

import copy
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from cocor.config.options import Config
from cocor.distributed.collectives import mean_over_ranks, reduce_gradients
from cocor.methods.base import Method, batch_statistics_only, feature_size
from cocor.step.composites import Timer
from cocor.step.optim import Cosine, adam, set_rate, sgd
from loaders.batch import Batch

Item = TypeVar("Item")


class OuterObjective:
    """MMNN and classifier on ``method``'s backbone.

    ``parameters`` are all that the encoder's optimiser steps.
    ``autocast()`` is the context in which networks run; ``steps_per_epoch`` scales the schedules.
    """

    def __init__(self, config: Config, method: Method, mmnn: nn.Module, classes: int, parameters: Sequence[Tensor], *,
                 steps_per_epoch: int, autocast: Callable[[], AbstractContextManager[None]]) -> None:  # fmt: skip
        self.config, self.backbone, self.mmnn, self.autocast = config, method.backbone, mmnn, autocast
        self.mmnn_at_start = copy.deepcopy(mmnn)
        owned = {id(p) for p in method.backbone.parameters()}
        self._inside = [id(p) in owned for p in parameters]
        self._backbone_parameters = self.of_backbone(parameters)
        self.classifier = nn.Linear(feature_size(method.backbone), classes).to(parameters[0].device)
        optimiser = adam if config.mmnn_optimiser == "adam" else sgd
        self.mmnn_optimiser: Optimizer = optimiser(mmnn.parameters(), config.mmnn_lr, config.mmnn_momentum)
        self.classifier_optimiser = sgd(
            self.classifier.parameters(), config.classifier_lr, 0.9, config.classifier_weight_decay
        )
        total = config.epochs * steps_per_epoch
        wait, warmup = config.mmnn_wait_epochs * steps_per_epoch, config.mmnn_warmup_epochs * steps_per_epoch
        self.mmnn_schedule = Cosine(total, warmup=warmup, wait=wait)
        self.classifier_schedule = Cosine(total)

    def parts(self) -> dict[str, Any]:
        """Return all modules and optimisers with a state, by name in a checkpoint."""
        return {
            "mmnn": self.mmnn,
            "mmnn_optimiser": self.mmnn_optimiser,
            "classifier": self.classifier,
            "classifier_optimiser": self.classifier_optimiser,
        }

    def set_rates(self, step: int) -> None:
        """Set the learning rates for optimiser step number ``step``."""
        for group in self.mmnn_optimiser.param_groups:
            set_rate(group, self.config.mmnn_lr * self.mmnn_schedule(step))
        for group in self.classifier_optimiser.param_groups:
            set_rate(group, self.config.classifier_lr * self.classifier_schedule(step))

    def of_backbone(self, values: Iterable[Item]) -> list[Item]:
        """Select the backbone's of ``values``, one per parameter of the encoder."""
        return [value for value, inside in zip(values, self._inside, strict=True) if inside]

    def with_zeros(self, values: Iterable[Tensor], parameters: Sequence[Tensor]) -> list[Tensor]:
        """Undo :meth:`of_backbone`, with zeros for other ``parameters``."""
        own = iter(values)
        return [
            next(own) if inside else torch.zeros_like(p) for p, inside in zip(parameters, self._inside, strict=True)
        ]

    def logits(self, labelled: Batch) -> Tensor:
        """Compute logits (B, classes) in the classifier's own precision."""
        with self.autocast(), batch_statistics_only(self.backbone):
            features = self.backbone(labelled.original)
        return self.classifier(features.to(self.classifier.weight.dtype))

    def classify(self, labelled: Batch) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Return cross-entropy (), accuracy () and backbone gradient, over all ranks.

        The classifier's gradient goes to ``.grad``.
        """
        logits = self.logits(labelled)
        cross_entropy = F.cross_entropy(logits, labelled.label)
        weight_and_bias = list(self.classifier.parameters())
        gradients = list(torch.autograd.grad(cross_entropy, [*self._backbone_parameters, *weight_and_bias]))
        reduce_gradients(gradients)
        count = len(self._backbone_parameters)
        for parameter, gradient in zip(weight_and_bias, gradients[count:], strict=True):
            parameter.grad = gradient
        accuracy = (logits.argmax(1) == labelled.label).float().mean()
        means = mean_over_ranks(torch.stack([cross_entropy.detach(), accuracy]))
        return means[0], means[1], gradients[:count]

    @torch.no_grad()
    def moved(self, composition: Tensor, target: Tensor) -> Tensor:
        """Return how far mean targets are from those before training, (L,)."""
        return target.mean(1) - self.mmnn_at_start(composition).mean(1)

    def step(self, surrogate: Tensor, timer: Timer, scale: float | Tensor = 1.0) -> Tensor:
        """Step MMNN and classifier; return the norm of the MMNN's gradient, ().

        ``surrogate`` is the scalar of :mod:`cocor.objective.hypergradient`; the MMNN's optimiser gets ``scale`` times
        its gradient, whose norm is without the scale.
        """
        self.mmnn_optimiser.zero_grad(set_to_none=True)
        surrogate.backward()
        gradients = [p.grad for p in self.mmnn.parameters() if p.grad is not None]
        with timer("communication"):
            reduce_gradients(gradients)
        norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
        with timer("optimiser"):
            torch._foreach_mul_(gradients, scale)
            self.mmnn_optimiser.step()
            self.classifier_optimiser.step()
        return norm
