"""Measure an encoder while it trains, by central crops of held-out images.

knn     k-NN accuracy, RankMe, alignment and uniformity (:mod:`cocor.eval.probes.geometry`)
probe   accuracy of a linear classifier, which sees all labels but never moves the encoder
"""

from collections.abc import Callable, Collection
from contextlib import closing
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from cocor.config.options import Config
from cocor.eval.features import evaluating
from cocor.eval.probes.geometry import alignment, rankme, uniformity
from cocor.eval.probes.knn import knn_accuracy
from cocor.eval.probes.softmax_regression import SoftmaxRegression
from loaders.batch import Loader
from loaders.errors import UserError

_PENALTY = 1e-3  # on the squared weights of the classifier, an image
_ITERATIONS = 100  # of L-BFGS


@dataclass(frozen=True)
class Measured:
    """Numbers to log by kind of record, ``knn`` and ``probe``, and a ``note`` on them."""

    values: dict[str, dict[str, float]]
    note: str = ""


class OnlineProbes:
    """Measurements of a backbone by training images (``bank``) and held-out ones.

    Of the held-out images, ``queries`` shows central crops and ``pairs`` two contrastive views of some.
    """

    def __init__(
        self, config: Config, bank: Loader, queries: Loader, pairs: Loader, precision: torch.dtype
    ) -> None:  # fmt: skip
        self.config, self.bank, self.queries, self.pairs, self.precision = config, bank, queries, pairs, precision

    def __call__(
        self, backbone: nn.Module, kinds: Collection[str], interrupted: Callable[[], object] = bool
    ) -> Measured | None:
        """Measure ``kinds`` in evaluation mode, and restore the modes of all parts.

        Returns None if ``interrupted``, called after every batch, returned something true.
        """
        with evaluating(backbone):
            (queries,), others = self._encode(backbone, self.queries, interrupted)
            (bank,), labels = self._encode(backbone, self.bank, interrupted)
            pairs = self._encode(backbone, self.pairs, interrupted)[0] if "knn" in kinds else queries
        if interrupted():
            return None
        if not (torch.isfinite(queries).all() and torch.isfinite(bank).all()):
            raise UserError("the encoder's features are no numbers any more: lower --lr, or raise --warmup-epochs")
        values, note = {}, ""
        if "knn" in kinds:
            k, temperature = self.config.knn_k, self.config.knn_temperature
            found = knn_accuracy(queries, others, bank, labels, k=k, temperature=temperature)
            note = found.note
            values["knn"] = {"accuracy": found.accuracy, "k": found.k, "queries": found.queries, "bank": found.bank}
            values["knn"] |= {"rankme": rankme(bank), "uniformity": uniformity(queries), "alignment": alignment(pairs)}
        if "probe" in kinds:
            values["probe"] = linear_accuracy(bank, labels, queries, others)
        return Measured(values, note)

    def close(self) -> None:
        for loader in (self.bank, self.queries, self.pairs):
            loader.close()

    @torch.no_grad()
    def _encode(
        self, backbone: nn.Module, loader: Loader, interrupted: Callable[[], object]
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Return the features (V, N, D) of all views, the original alone or the contrastive ones, and labels (N,)."""
        features, labels = [], []
        device = next(backbone.parameters()).device
        with closing(loader.epoch(0)) as batches:
            for batch in batches:
                views = batch.views if len(batch.views) else batch.original[None]
                with torch.autocast(device.type, self.precision, enabled=self.precision != torch.float32):
                    features.append(torch.stack([backbone(view).float() for view in views]))
                labels.append(batch.label)
                if interrupted():
                    break
        return torch.cat(features, 1), torch.cat(labels)


def linear_accuracy(train: Tensor, labels: Tensor, test: Tensor, test_labels: Tensor) -> dict[str, float]:
    """Return the accuracy of a softmax regression on others' features and on its own.

    Features (N, D) are standardised. The penalty is one for all encoders, as none is chosen on held-out images:
    ``cocor-eval linear`` does that.
    """
    mean, deviation = train.mean(0), train.std(0).clamp(min=1e-6)
    inputs, others = (train - mean) / deviation, (test - mean) / deviation
    classes = int(torch.maximum(labels.max(), test_labels.max())) + 1
    fit = SoftmaxRegression(inputs, labels, classes).fit(_PENALTY * len(labels), iterations=_ITERATIONS)

    def accuracy(features: Tensor, wanted: Tensor) -> float:
        predicted = (features @ fit.weights[:-1] + fit.weights[-1]).argmax(1)
        return (predicted == wanted.to(predicted.device)).float().mean().item()

    return {"accuracy": accuracy(others, test_labels), "train_accuracy": accuracy(inputs, labels)}
