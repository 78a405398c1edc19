"""Measure k-NN while training runs: the first sign that an encoder learns."""

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

import torch
from torch import Tensor, nn

from cocor.config.options import Config
from cocor.eval.probes.knn import KnnResult, knn_accuracy
from loaders.batch import Loader
from loaders.errors import UserError


class OnlineKnn:
    """k-NN accuracy of a backbone by central crops of training and held-out images."""

    def __init__(self, config: Config, bank: Loader, queries: Loader, precision: torch.dtype) -> None:
        self.config, self.bank, self.queries, self.precision = config, bank, queries, precision

    def __call__(self, backbone: nn.Module, interrupted: Callable[[], object] = bool) -> KnnResult | None:
        """Measure ``backbone`` in evaluation mode; its parts then return to their own modes.

        Returns None if ``interrupted``, called after every batch, returned something true.
        """
        with evaluating(backbone):
            queries, query_labels = self._features(backbone, self.queries, interrupted)
            bank, bank_labels = self._features(backbone, self.bank, interrupted)
        if interrupted():
            return None
        if not (torch.isfinite(queries).all() and torch.isfinite(bank).all()):
            raise UserError("the encoder's features are no numbers any more: lower --lr, or raise --warmup-epochs")
        return knn_accuracy(
            queries, query_labels, bank, bank_labels, k=self.config.knn_k, temperature=self.config.knn_temperature
        )

    def close(self) -> None:
        self.bank.close()
        self.queries.close()

    @torch.no_grad()
    def _features(
        self, backbone: nn.Module, loader: Loader, interrupted: Callable[[], object]
    ) -> tuple[Tensor, Tensor]:
        features, labels = [], []
        device = next(backbone.parameters()).device
        with closing(loader.epoch(0)) as batches:
            for batch in batches:
                with torch.autocast(device.type, self.precision, enabled=self.precision != torch.float32):
                    features.append(backbone(batch.original).float())
                labels.append(batch.label)
                if interrupted():
                    break
        return torch.cat(features), torch.cat(labels)


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
