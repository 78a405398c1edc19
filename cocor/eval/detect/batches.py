"""Decode batches of annotated images, chosen by seed and iteration alone."""

import logging
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from cocor.distributed.collectives import together
from cocor.eval.detect.datasets import AnnotatedImage
from loaders.datasets.decode import decode
from loaders.errors import UnusableImage, UserError

Key = tuple[int, bool]  # place of an image, whether mirrored
_log = logging.getLogger(__name__)


class Sample(NamedTuple):
    """Image for torchvision's detectors: pixels uint8 (3, H, W), boxes, labels from 1."""

    image: AnnotatedImage
    pixels: Tensor
    target: dict[str, Tensor]


class _Samples(Dataset[Sample | UnusableImage]):
    """Images by (place, whether mirrored).

    A fault is returned: a worker's exceptions lose their one line.
    """

    def __init__(self, images: Sequence[AnnotatedImage]) -> None:
        self._images = images

    def __getitem__(self, key: Key) -> Sample | UnusableImage:
        image, mirrored = self._images[key[0]], key[1]
        try:
            pixels = torch.from_numpy(np.array(decode(str(image.path)))).permute(2, 0, 1)
        except UnusableImage as fault:
            return fault
        boxes, width = torch.from_numpy(image.boxes), pixels.shape[2]
        if mirrored:
            pixels = pixels.flip(2)
            boxes = torch.stack([width - boxes[:, 2], boxes[:, 1], width - boxes[:, 0], boxes[:, 3]], 1)
        return Sample(image, pixels, {"boxes": boxes, "labels": torch.from_numpy(image.labels) + 1})


class Batches:
    """Training batches: ``size`` images of one orientation, half of them mirrored.

    Wide and tall images are not mixed, which would pad both; what is left of either group waits for the next epoch.
    """

    def __init__(self, images: Sequence[AnnotatedImage], size: int, seed: int) -> None:
        self.images, self._size, self._seed = images, size, seed
        self._tall = torch.tensor([image.size[1] > image.size[0] for image in images])
        tall = int(self._tall.sum())
        self._of_an_epoch = tall // size + (len(images) - tall) // size
        if not self._of_an_epoch:
            most = max(tall, len(images) - tall)
            raise UserError(f"--batch-size {size}: only {most:,} images are of one orientation; use that or fewer")

    def keys(self, iterations: range) -> Iterator[list[Key]]:
        """Yield the keys of the images of each batch."""
        rows: list[list[Key]] = []
        epoch = -1
        for iteration in iterations:
            if iteration // self._of_an_epoch != epoch:
                epoch = iteration // self._of_an_epoch
                rows = self._epoch(epoch)
            yield rows[iteration % self._of_an_epoch]

    def _epoch(self, epoch: int) -> list[list[Key]]:
        generator = torch.Generator().manual_seed((self._seed * 1_000_003 + epoch) % 2**63)
        order = torch.randperm(len(self._tall), generator=generator)
        groups = [order[self._tall[order] == kind] for kind in (False, True)]
        rows = torch.cat([group[: len(group) // self._size * self._size].view(-1, self._size) for group in groups])
        rows = rows[torch.randperm(len(rows), generator=generator)]
        mirrored = torch.rand(rows.shape, generator=generator) < 0.5
        return [list(zip(*both, strict=True)) for both in zip(rows.tolist(), mirrored.tolist(), strict=True)]


def decoded(
    images: Sequence[AnnotatedImage], keys: Iterable[list[Key]], workers: int, on_error: str
) -> Iterator[list[Sample]]:
    """Decode each batch in ``workers`` processes, on all ranks at once.

    An image that cannot be read is a UserError on all ranks or, with ``on_error`` "skip", left out with a warning.
    """
    named: set[str] = set()
    loader: DataLoader[Sample | UnusableImage] = DataLoader(
        _Samples(images), batch_sampler=keys, num_workers=workers, collate_fn=list
    )  # fmt: skip
    for batch in loader:
        yield together(partial(_readable, batch, on_error, named))


def _readable(batch: Sequence[Sample | UnusableImage], on_error: str, named: set[str]) -> list[Sample]:
    faults = [str(sample) for sample in batch if isinstance(sample, UnusableImage)]
    if faults and on_error == "stop":
        raise UserError(f"{faults[0]}; --on-error skip leaves such images out")
    for fault in faults:
        if fault not in named:
            _log.warning(f"left out: {fault}")
            named.add(fault)
    return [sample for sample in batch if isinstance(sample, Sample)]
