"""Steps of every method on 1, 2 and 4 ranks, as a program: ``python -m helpers.method_programs FOLDER IMAGES``.

Main ranks write to FOLDER what the steps did: losses, averaged gradients of encoder, MMNN and classifier, and the state
behind them; :mod:`test_methods_ranks` compares the files. Ranks are forked, since importing takes longer than steps.
"""

import copy
import os
import socket
import sys
import traceback
from contextlib import closing, suppress
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from timm.models import register_model
from timm.models.resnet import BasicBlock, ResNet
from torch import Tensor, nn

from cocor.auxiliary import AUXILIARIES, equimod, stl
from cocor.config.options import Config
from cocor.config.resolve import resolve
from cocor.data import labelled_loader, open_data, training_loader, training_plan
from cocor.distributed import collectives
from cocor.distributed.collectives import World, mean_over_ranks
from cocor.methods import METHODS, spec
from cocor.models import build_auxiliary, build_method, build_target
from cocor.step.step import TrainingStep
from helpers.steps import wake
from loaders.batch import Batch
from loaders.errors import UserError
from loaders.views.plan import ViewPlan

STEPS, CLASSES = 2, 4


@register_model
def two_blocks(num_classes: int = 0, **options: Any) -> ResNet:
    """A ResNet with few BatchNorms, since each takes four messages between ranks in every pass."""
    model = ResNet(BasicBlock, (2, 0, 0, 0), num_classes, channels=(16, 16, 16, 16), stem_width=16)
    for block in model.layer1:
        block.bn2 = nn.Identity()
    return model


SMALL: dict[str, Any] = {
    "loader": "torch", "workers": 1, "gpus": 0, "precision": "fp32", "backbone": "two_blocks", "image_size": 32,
    "batch_size": 8, "labelled_batch_size": 8, "label_fraction": 0.5, "epochs": 1, "lr": 0.05, "final_lr": 0.0,
    "queue_size": 16, "key_bn_splits": 4, "embedding_dim": 12, "projector_dim": 16, "predictor_dim": 8,
    "mmnn_optimiser": "sgd", "mmnn_lr": 1.0, "mmnn_wait_epochs": 0, "mmnn_warmup_epochs": 0, "sync_bn": True,
}  # fmt: skip
CHEAPER = {"lengths_per_step": 2, "composite_size": 24, "mmnn_every": 2}  # see cocor.step.subsample
ON_TWO = {  # MoCo
    "plain": {"consistency": "none"}, "abs": {"consistency": "abs", "hypergradient": "taylor"},
    "adamw": {"optimiser": "adamw", "lr": 1e-3, "clip_grad": 0.1},
}  # fmt: skip


def with_auxiliaries() -> dict[str, dict[str, Any]]:
    """Name and options of every auxiliary with MoCo; of multiview, which differs between methods, with all."""
    found = {}
    for auxiliary, method, pairs in product(list(AUXILIARIES)[1:], METHODS, ("views", "composites")):
        if auxiliary != "multiview" and method != "moco":
            continue
        options = {"auxiliary": auxiliary, "method": method, "auxiliary_pairs": pairs, "consistency": "none"}
        in_pairs = "auxiliary_pairs" in spec(auxiliary, AUXILIARIES).options
        with suppress(UserError):
            resolve(SMALL | options)
            found[f"{auxiliary} {method}" + f" {pairs}" * in_pairs] = options
    return found


def batches(config: Config, world: World) -> list[tuple[Batch, Batch | None]]:
    """This rank's share of the first steps, in float64; of one only on four ranks, which take long on few cores."""
    count = STEPS if world.size < 4 else 1
    data = open_data(config)
    loader = training_loader(config, data, world, torch.float64)
    labelled = labelled_loader(config, data, world, torch.float64, loader.steps_per_epoch)
    if labelled is None:
        with closing(loader), closing(loader.epoch(0)) as one:
            return [(batch, None) for batch, _ in zip(one, range(count), strict=False)]
    with closing(loader), closing(labelled), closing(loader.epoch(0)) as one, closing(labelled.epoch(0)) as other:
        return [pair for pair, _ in zip(zip(one, other, strict=False), range(count), strict=False)]


def in_dtype(batch: Batch, dtype: torch.dtype) -> Batch:
    images = {name: getattr(batch, name) for name in ("views", "original", "composites", "kept")}
    return replace(batch, **{name: part.to(dtype) for name, part in images.items() if part is not None})


def steps(config: Config, world: World, mmnn: nn.Module | None, pairs: list[tuple[Batch, Batch | None]],
          dtype: torch.dtype) -> dict[str, Tensor]:  # fmt: skip
    """What steps on ``pairs`` did, and the state behind them."""
    method, target = build_method(config, world), copy.deepcopy(mmnn)
    wake(method)
    auxiliary = build_auxiliary(config, method, world)
    torch.manual_seed(0)
    step = TrainingStep(config, method, target, CLASSES, steps_per_epoch=STEPS, auxiliary=auxiliary)
    parts: dict[str, nn.Module] = {"method": method}
    if auxiliary is not None:
        parts["auxiliary"] = auxiliary
    if target is not None and step.outer is not None:
        parts |= {"mmnn": target, "classifier": step.outer.classifier}
        step.outer.mmnn_at_start.to(dtype)
    for part in parts.values():
        part.to(dtype)
    done: dict[str, Tensor] = {}
    for number, (batch, labelled) in enumerate(pairs):
        metrics = step(in_dtype(batch, dtype), None if labelled is None else in_dtype(labelled, dtype), number)
        done |= {f"{number} {name}": mean_over_ranks(value) for name, value in metrics.items()}
        for place, part in parts.items():
            gradients = {name: p.grad for name, p in part.named_parameters() if p.grad is not None}
            done |= {f"{number} gradient {place}.{name}": value.clone() for name, value in gradients.items()}
    done |= {f"{place}.{name}": value for place, part in parts.items() for name, value in part.state_dict().items()}
    return done


def work(images: Path, world: World, file: Path) -> None:
    equimod._HIDDEN = stl._HIDDEN = stl._DIM = 16  # larger ones would take minutes to send
    results: dict[str, dict[str, Any]] = {"float64": {}, "float32": {}}
    plain = resolve(SMALL | {"data": images})
    pairs, mmnn = batches(plain, world), build_target(plain, world)  # fitting an MMNN takes a second
    assert mmnn is not None
    for method in METHODS:
        config = resolve(SMALL | {"method": method, "data": images})
        results["float64"][method] = steps(config, world, mmnn, pairs, torch.float64)
        if world.size < 4:
            results["float32"][method] = steps(config, world, mmnn, pairs[:1], torch.float32)
    config = resolve(SMALL | CHEAPER | {"data": images})
    results["float64"]["cheaper"] = steps(config, world, mmnn, batches(config, world), torch.float64)
    planned: dict[ViewPlan, list[tuple[Batch, Batch | None]]] = {}
    for name, options in with_auxiliaries().items():
        config = resolve(SMALL | options | {"data": images})
        plan = training_plan(config)
        planned[plan] = planned.get(plan) or batches(config, world)
        results["float64"][name] = steps(config, world, None, planned[plan], torch.float64)
    for name, options in ON_TWO.items() if world.size < 4 else ():
        config = resolve(SMALL | options | {"data": images})
        results["float64"][name] = steps(config, world, None if name == "plain" else mmnn, pairs, torch.float64)
    if world.main:
        torch.save(results, file)


def fork(rank: int, ranks: int, port: int, folder: Path, images: Path) -> int:
    """Start a rank as torchrun would; return its process number."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        torch.set_num_threads(1)
        place = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
        os.environ |= {name: str(value) for name, value in place.items()} | {"MASTER_ADDR": "127.0.0.1"}
        work(images, collectives.init(use_gpu=False), folder / f"{ranks}.pt")
        collectives.shutdown()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    for ranks in (1, 2, 4):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        started = [fork(rank, ranks, port, Path(sys.argv[1]), Path(sys.argv[2])) for rank in range(ranks)]
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in started]
        assert not any(codes), codes
