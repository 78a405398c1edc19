"""Small training steps on noise, for tests of how a step is executed."""

from collections.abc import Iterator

import torch
from torch import Tensor

from cocor.config.options import Config
from cocor.config.resolve import resolve
from cocor.distributed.collectives import World
from cocor.models import build_method, build_target
from cocor.step.step import TrainingStep
from loaders.batch import Batch

CPU, GPU = World(0, 0, 1, torch.device("cpu")), World(0, 0, 1, torch.device("cuda"))


CLASSES = 5


def config_for(**options: object) -> Config:
    values = {
        "backbone": "test_resnet", "image_size": 32, "batch_size": 16, "queue_size": 64, "key_bn_splits": 2,
        "embedding_dim": 16, "projector_dim": 32, "predictor_dim": 16, "epochs": 1, "mmnn_wait_epochs": 0,
        "mmnn_warmup_epochs": 0, "lr": 0.05, "precision": "fp32",
    }  # fmt: skip
    return resolve(values | options)


def build(config: Config, world: World) -> TrainingStep:
    method, target = build_method(config, world), build_target(config, world)
    return TrainingStep(config, method, target, CLASSES, steps_per_epoch=40)


def batches(config: Config, device: torch.device, count: int) -> Iterator[tuple[Batch, Batch]]:
    """Noise on the device, other in every step."""
    generator = torch.Generator(device).manual_seed(1)
    lengths = len(config.lengths) if config.consistency != "none" else 0

    def images(*shape: int) -> Tensor:
        return torch.randn(*shape, 32, 32, 3, device=device, generator=generator).movedim(-1, -3)

    for step in range(count):
        size, few = config.batch_size, 6
        composition = torch.zeros(lengths, size, 14, dtype=torch.uint8, device=device)
        for at in range(lengths):
            composition[at, :, step % 14] = at + 1
        label = torch.arange(size, device=device) % CLASSES
        yield (
            Batch(images(2, size), images(size), images(lengths, size), composition, label, label + step),
            Batch(images(0, few), images(few), images(0, few), composition[:0, :few], label[:few], label[:few]),
        )
