"""Fine-tune a detector by MoCo's protocol, with checkpoints; then detect.

batches (seed, iteration) -> losses -> SGD ... -> BatchNorm's statistics anew -> detections of the test images
"""

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torchvision.models.detection import FasterRCNN

from cocor import checkpoint
from cocor.distributed.collectives import World, gather_objects, mean_over_ranks, on_main, reduce_gradients
from cocor.eval.detect.average_precision import Rows
from cocor.eval.detect.batches import Batches, Key, Sample, decoded
from cocor.eval.detect.datasets import AnnotatedImage, DetectionSet
from cocor.eval.detect.recipe import Recipe
from cocor.methods.batchnorm import synchronise_batch_norm
from loaders.errors import UserError
from loaders.progress import track

_MOMENTUM, _WEIGHT_DECAY = 0.9, 1e-4
_STATISTICS_FROM = 200  # batches from which BatchNorm's statistics are taken at the end (Detectron2's PRECISE_BN)
_CURVE = 100  # mean losses in a report
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Work:
    """Ranks and decoding ``workers``; a checkpoint in ``folder`` ``every`` iterations."""

    world: World
    workers: int
    on_error: str
    folder: Path
    every: int


def fine_tune(
    model: FasterRCNN, train: DetectionSet, recipe: Recipe, work: Work, identity: dict[str, str]
) -> list[float]:
    """Train ``model`` in place, from the newest checkpoint on; return the loss curve.

    A run that was interrupted sees the same batches and draws as one that was not. ``identity`` says what else, besides
    ``recipe``, a checkpoint must agree in.

    Raises:
        UserError: the ranks cannot share a batch, the loss is no number, an image cannot be read, or checkpoints are of
            another run.
    """
    world = work.world
    if recipe.batch_size % world.size:
        raise UserError(f"--batch-size {recipe.batch_size}: the {world.size} ranks share it; use a multiple of that")
    batches = Batches(train.images, recipe.batch_size, recipe.seed)
    _place(model, world)
    optimiser = torch.optim.SGD(_groups(model), recipe.lr, momentum=_MOMENTUM)
    settings = {**{name: str(value) for name, value in asdict(recipe).items()}, **identity}
    first, losses = _resumed(model, optimiser, settings, work.folder)
    todo = range(first, recipe.iterations)
    stream = _share(train.images, batches.keys(todo), work)
    for iteration, batch in zip(todo, track(stream, len(todo), "fine-tuning", "iterations"), strict=True):
        # Sizes and sampled boxes are those of an unbroken run, and differ between ranks.
        torch.manual_seed(((recipe.seed + iteration) * world.size + world.rank) % 2**63)
        for group in optimiser.param_groups:
            group["lr"] = recipe.rate(iteration)
        losses.append(_step(model, optimiser, batch, world.device))
        if not abs(losses[-1]) < float("inf"):
            raise UserError(f"iteration {iteration}: the loss is no longer finite; lower --lr ({recipe.lr:g})")
        done = iteration + 1
        if done % work.every == 0 or done == recipe.iterations:
            _log.info(f"iteration {done:,} of {recipe.iterations:,}: loss {_mean(losses[-work.every :]):.3f}")
            state = {"step": done, "model": model.state_dict(), "optimiser": optimiser.state_dict()}
            state |= {"settings": settings, "losses": losses}
            on_main(partial(checkpoint.save, work.folder, state, keep=1))
    anew = range(recipe.iterations, recipe.iterations + min(_STATISTICS_FROM, recipe.iterations))
    stream = _share(train.images, batches.keys(anew), work)
    _renew_statistics(model, track(stream, len(anew), "statistics of BatchNorm", "batches"), world.device)
    width = max(1, -(-len(losses) // _CURVE))
    return [round(_mean(losses[at : at + width]), 4) for at in range(0, len(losses), width)]


def _place(model: FasterRCNN, world: World) -> None:
    """Make the model ready for training on this rank's device."""
    if world.size > 1:
        synchronise_batch_norm(model, world.device)
    model.to(world.device).train()
    if world.device.type == "cuda":
        model.to(memory_format=torch.channels_last)


def _share(images: Sequence[AnnotatedImage], keys: Iterable[list[Key]], work: Work) -> Iterator[list[Sample]]:
    """Decode this rank's share of every batch."""
    own = (batch[work.world.rank :: work.world.size] for batch in keys)
    return decoded(images, own, work.workers, work.on_error)


def _groups(model: nn.Module) -> list[dict[str, Any]]:
    """Split the parameters: all decay but those of norms."""
    norms = {id(p) for module in model.modules() if isinstance(module, _BatchNorm) for p in module.parameters()}
    others = [p for p in model.parameters() if id(p) not in norms]
    ours = [p for p in model.parameters() if id(p) in norms]
    return [{"params": others, "weight_decay": _WEIGHT_DECAY}, {"params": ours, "weight_decay": 0.0}]


def _resumed(
    model: nn.Module, optimiser: torch.optim.Optimizer, settings: dict[str, str], folder: Path
) -> tuple[int, list[float]]:
    """Load the newest checkpoint, if any; return its iterations and their losses."""
    newest = checkpoint.newest(folder)
    if newest is None:
        return 0, []
    path, state = newest
    saved = state.get("settings", {})
    other = [name for name, value in settings.items() if saved.get(name) != value]
    if other:
        was, now = saved.get(other[0]), settings[other[0]]
        raise UserError(f"{path}: was made with {other[0]} {was}, not {now}; choose another --output, or remove it")
    model.load_state_dict(state["model"])
    optimiser.load_state_dict(state["optimiser"])
    _log.info(f"going on at iteration {state['step']:,}, from {path}")
    return state["step"], list(state["losses"])


def _step(model: FasterRCNN, optimiser: torch.optim.Optimizer, batch: Sequence[Sample], device: torch.device) -> float:
    loss = _loss(model, batch, device)
    optimiser.zero_grad()
    loss.backward()
    reduce_gradients([parameter.grad for parameter in model.parameters() if parameter.grad is not None])
    optimiser.step()
    return float(mean_over_ranks(loss.detach()))


def _loss(model: FasterRCNN, batch: Sequence[Sample], device: torch.device) -> Tensor:
    """Sum the losses of proposals (objectness, box) and regions (class, box)."""
    if not batch:
        raise UserError("no image of a batch can be read; repair the data, or raise --batch-size")
    targets = [{name: value.to(device) for name, value in sample.target.items()} for sample in batch]
    return torch.stack(list(model([_pixels(sample, device) for sample in batch], targets).values())).sum()


def _pixels(sample: Sample, device: torch.device) -> Tensor:
    return sample.pixels.to(device, non_blocking=True).float() / 255


def _mean(values: Sequence[float]) -> float:
    return sum(values) / max(1, len(values))


@torch.no_grad()
def _renew_statistics(model: FasterRCNN, batches: Iterable[list[Sample]], device: torch.device) -> None:
    """Replace BatchNorm's running statistics by means over ``batches``."""
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            module.reset_running_stats()
            module.momentum = None  # the plain mean
    torch.manual_seed(0)
    for batch in batches:
        _loss(model, batch, device)


@torch.no_grad()
def detect_objects(model: FasterRCNN, test: DetectionSet, work: Work) -> tuple[Rows, DetectionSet]:
    """Detect the objects of every test image, one image at a time on each rank.

    Returns rows of COCO's result format and the set of the images that could be read.
    """
    model.eval()
    rows: Rows = []
    read: set[int | str] = set()
    count, size = len(test.images), work.world.size
    keys = ([(place, False) for place in range(first, min(first + size, count))] for first in range(0, count, size))
    for batch in track(_share(test.images, keys, work), count, "detecting", "images", size):
        for sample in batch:  # at most one
            (found,) = model([_pixels(sample, work.world.device)])
            read.add(sample.image.id)
            boxes, labels, scores = (found[name].cpu() for name in ("boxes", "labels", "scores"))
            boxes[:, 2:] -= boxes[:, :2]
            rows += [
                {"image_id": sample.image.id, "category_id": test.category_ids[label - 1],
                 "bbox": [round(side, 2) for side in box], "score": round(score, 5)}
                for box, label, score in zip(boxes.tolist(), labels.tolist(), scores.tolist(), strict=True)
            ]  # fmt: skip
    shares = gather_objects((rows, read))
    read = set().union(*(share[1] for share in shares))
    kept = tuple(image for image in test.images if image.id in read)
    return [row for share in shares for row in share[0]], replace(test, images=kept)
