"""Checks of a command's data by its labels and counts alone, before hours go into features."""

import argparse

import torch
from torch import Tensor

from cocor.eval.datasets.protocols import WAY_SHOTS
from cocor.eval.datasets.splits import Splits
from cocor.eval.probes.fewshot import check_shots, check_ways
from cocor.eval.probes.linear import check_splits
from loaders.datasets.dataset import ImageDataset
from loaders.errors import UserError


def check_probe(splits: Splits, validates: bool = True) -> None:
    """UserError unless a linear probe can learn from the splits and be tested on them; one that never ``validates``
    learns from the validation images as well."""
    train, val = _labels(splits.train), _labels(splits.val)
    if not validates:
        train = val = torch.cat([train, val])
    check_splits(train, val, _labels(splits.test))


def check_fewshot(options: argparse.Namespace, splits: Splits) -> None:
    """UserError unless there are classes and images enough for all shots and tasks."""
    pool = torch.cat([_labels(splits.train), _labels(splits.val)])
    check_splits(pool, pool, _labels(splits.test))
    for count in options.shots:
        check_shots(pool, count, splits.train.classes)
    for count in WAY_SHOTS if options.tasks else ():
        check_ways(_labels(splits.test), count, options.ways)


def check_knn(options: argparse.Namespace, splits: Splits) -> None:
    """UserError unless the bank holds ``--k`` neighbours for the test images; each of ten crops is a member of it."""
    train, val = _known(splits.train), _known(splits.val)
    crops = 10 if options.crop == "ten" else 1
    _check_bank(options, torch.cat([train, val]), len(train) * crops + len(val), len(_known(splits.test)))


def check_leave_one_out(options: argparse.Namespace, dataset: ImageDataset) -> None:
    """As :func:`check_knn`, for a set each of whose images is classified by all others."""
    labels = _known(dataset)
    _check_bank(options, labels, len(labels) - 1, len(labels))


def check_retrieval(options: argparse.Namespace, splits: Splits) -> None:
    """UserError if the bank holds fewer images than ``--neighbours``."""
    most = len(splits.train)
    if options.neighbours > most:
        raise UserError(f"--neighbours {options.neighbours}: the bank holds {most:,} images; use that or fewer")


def _check_bank(options: argparse.Namespace, labels: Tensor, most: int, queries: int) -> None:
    if most < 1 or not queries:
        raise UserError("k-NN needs images with labels in the bank and among the queries")
    if len(labels.unique()) < 2:
        raise UserError("all images of the bank are of 1 class; k-NN needs two or more class folders")
    too_large = [k for k in options.k or () if k > most]
    if too_large:
        raise UserError(f"--k {too_large[0]}: the bank holds {most:,} images; use {most} or fewer")


def _labels(dataset: ImageDataset) -> Tensor:
    return torch.from_numpy(dataset.labels.copy())


def _known(dataset: ImageDataset) -> Tensor:
    labels = _labels(dataset)
    return labels[labels >= 0]
