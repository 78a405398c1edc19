"""Measure an encoder while it trains, by central crops of held-out images.

knn     k-NN accuracy, RankMe, alignment and uniformity (:mod:`cocor.eval.probes.geometry`)
probe   accuracy of a linear classifier, which sees all labels but never moves the encoder
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from cocor.config.options import Config
from cocor.eval.probes.geometry import alignment, rankme, uniformity
from cocor.eval.probes.knn import knn_accuracy
from cocor.eval.probes.softmax_regression import SoftmaxRegression
from loaders.batch import Loader
from loaders.errors import UserError

_PAIRED_BATCHES = 4  # of the queries, whose contrastive views are encoded as well
_PENALTY = 1e-3  # on the squared weights of the classifier, an image
_ITERATIONS = 100  # of L-BFGS


@dataclass(frozen=True)
class Measured:
    """Numbers to log by kind of record, ``knn`` and ``probe``, and a ``note`` on them."""

    values: dict[str, dict[str, float]]
    note: str = ""


@dataclass(frozen=True)
class _Encoded:
    """Features (N, D), labels (N,), and features (2, P, D) of pairs of views."""

    features: Tensor
    labels: Tensor
    pairs: Tensor


class OnlineProbes:
    """Measurements of a backbone by training images (``bank``) and held-out ones."""

    def __init__(self, config: Config, bank: Loader, queries: Loader, precision: torch.dtype) -> None:
        self.config, self.bank, self.queries, self.precision = config, bank, queries, precision

    def __call__(
        self, backbone: nn.Module, kinds: Collection[str], interrupted: Callable[[], object] = bool
    ) -> Measured | None:
        """Measure ``kinds`` in evaluation mode, and restore the modes of all parts.

        Returns None if ``interrupted``, called after every batch, returned something true.
        """
        with evaluating(backbone):
            queries = self._encode(backbone, self.queries, interrupted, _PAIRED_BATCHES if "knn" in kinds else 0)
            bank = self._encode(backbone, self.bank, interrupted)
        if interrupted():
            return None
        if not (torch.isfinite(queries.features).all() and torch.isfinite(bank.features).all()):
            raise UserError("the encoder's features are no numbers any more: lower --lr, or raise --warmup-epochs")
        values, note = {}, ""
        if "knn" in kinds:
            values["knn"], note = self._knn(bank, queries)
        if "probe" in kinds:
            values["probe"] = linear_accuracy(bank.features, bank.labels, queries.features, queries.labels)
        return Measured(values, note)

    def close(self) -> None:
        self.bank.close()
        self.queries.close()

    def _knn(self, bank: _Encoded, queries: _Encoded) -> tuple[dict[str, float], str]:
        found = knn_accuracy(
            queries.features, queries.labels, bank.features, bank.labels,
            k=self.config.knn_k, temperature=self.config.knn_temperature,
        )  # fmt: skip
        values = {"accuracy": found.accuracy, "k": found.k, "queries": found.queries, "bank": found.bank}
        values |= {"rankme": rankme(bank.features), "uniformity": uniformity(queries.features)}
        return values | {"alignment": alignment(queries.pairs)}, found.note

    @torch.no_grad()
    def _encode(
        self, backbone: nn.Module, loader: Loader, interrupted: Callable[[], object], paired: int = 0
    ) -> _Encoded:
        """Encode all images, and two views of those in ``paired`` batches."""
        features, labels, pairs = [], [], []
        device = next(backbone.parameters()).device
        every = max(1, loader.steps_per_epoch // paired) if paired else 0
        with closing(loader.epoch(0)) as batches:
            for number, batch in enumerate(batches):
                with torch.autocast(device.type, self.precision, enabled=self.precision != torch.float32):
                    features.append(backbone(batch.original).float())
                    if every and number % every == 0:
                        pairs.append(torch.stack([backbone(view).float() for view in batch.views]))
                labels.append(batch.label)
                if interrupted():
                    break
        return _Encoded(torch.cat(features), torch.cat(labels), torch.cat(pairs, 1) if pairs else torch.empty(0))


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


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Put ``module`` into evaluation mode; afterwards parts return to their own."""
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode
