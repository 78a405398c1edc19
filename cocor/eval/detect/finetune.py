"""Fine-tune a detector by MoCo's protocol, with checkpoints; then detect.

batches (seed, iteration) -> losses -> SGD ... -> BatchNorm's statistics anew -> detections of the test images
"""

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torchvision.models.detection import FasterRCNN

from cocor import checkpoint
from cocor.eval.detect.average_precision import Rows
from cocor.eval.detect.batches import Batches, Sample, decoded
from cocor.eval.detect.datasets import DetectionSet
from cocor.eval.detect.recipe import Recipe
from loaders.errors import UserError
from loaders.progress import track

_MOMENTUM, _WEIGHT_DECAY = 0.9, 1e-4
_STATISTICS_FROM = 200  # batches from which BatchNorm's statistics are taken at the end (Detectron2's PRECISE_BN)
_CURVE = 100  # mean losses in a report
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Work:
    """How to compute: on ``device``, images decoded by ``workers``, checkpoints in ``folder`` every ``every``."""

    device: torch.device
    workers: int
    on_error: str
    folder: Path
    every: int


def fine_tune(
    model: FasterRCNN, train: DetectionSet, recipe: Recipe, work: Work, identity: dict[str, str]
) -> list[float]:
    """Train ``model`` in place, going on from the newest checkpoint; return the course of the loss.

    A run that was interrupted sees the same batches and draws as one that was not. ``identity`` says what else, besides
    ``recipe``, a checkpoint must agree in.

    Raises:
        UserError: the loss is no number, an image cannot be read, or checkpoints are of another run.
    """
    batches = Batches(train.images, recipe.batch_size, recipe.seed)
    model.to(work.device).train()
    if work.device.type == "cuda":
        model.to(memory_format=torch.channels_last)
    optimiser = torch.optim.SGD(_groups(model), recipe.lr, momentum=_MOMENTUM)
    settings = {**{name: str(value) for name, value in asdict(recipe).items()}, **identity}
    first, losses = _resumed(model, optimiser, settings, work.folder)
    todo = range(first, recipe.iterations)
    stream = decoded(train.images, batches.keys(todo), work.workers, work.on_error)
    for iteration, batch in zip(todo, track(stream, len(todo), "fine-tuning", "iterations"), strict=True):
        torch.manual_seed(recipe.seed + iteration)  # sizes and sampled boxes are those of an unbroken run
        for group in optimiser.param_groups:
            group["lr"] = recipe.rate(iteration)
        if batch:
            losses.append(_step(model, optimiser, batch, work.device))
        if not all(map(_finite, losses[-1:])):
            raise UserError(f"iteration {iteration}: the loss is no longer finite; lower --lr ({recipe.lr:g})")
        done = iteration + 1
        if done % work.every == 0 or done == recipe.iterations:
            _log.info(f"iteration {done:,} of {recipe.iterations:,}: loss {_mean(losses[-work.every :]):.3f}")
            state = {"step": done, "model": model.state_dict(), "optimiser": optimiser.state_dict()}
            checkpoint.save(work.folder, state | {"settings": settings, "losses": losses}, keep=1)
    anew = range(recipe.iterations, recipe.iterations + min(_STATISTICS_FROM, recipe.iterations))
    stream = decoded(train.images, batches.keys(anew), work.workers, work.on_error)
    _renew_statistics(model, track(stream, len(anew), "statistics of BatchNorm", "batches"), work.device)
    width = max(1, -(-len(losses) // _CURVE))
    return [round(_mean(losses[at : at + width]), 4) for at in range(0, len(losses), width)]


def _groups(model: nn.Module) -> list[dict[str, Any]]:
    """Split the parameters: all decay but those of norms."""
    norms = {id(p) for module in model.modules() if isinstance(module, _BatchNorm) for p in module.parameters()}
    others = [p for p in model.parameters() if id(p) not in norms]
    ours = [p for p in model.parameters() if id(p) in norms]
    return [{"params": others, "weight_decay": _WEIGHT_DECAY}, {"params": ours, "weight_decay": 0.0}]


def _resumed(
    model: nn.Module, optimiser: torch.optim.Optimizer, settings: dict[str, str], folder: Path
) -> tuple[int, list[float]]:
    """Load the newest checkpoint, if there is one; return the finished iterations and their losses."""
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
    optimiser.step()
    return float(loss.detach())


def _loss(model: FasterRCNN, batch: Sequence[Sample], device: torch.device) -> Tensor:
    """Return the sum of the losses of proposals (objectness, box) and regions (class, box)."""
    targets = [{name: value.to(device) for name, value in sample.target.items()} for sample in batch]
    return torch.stack(list(model([_pixels(sample, device) for sample in batch], targets).values())).sum()


def _pixels(sample: Sample, device: torch.device) -> Tensor:
    return sample.pixels.to(device, non_blocking=True).float() / 255


def _finite(value: float) -> bool:
    return abs(value) < float("inf")


def _mean(values: Sequence[float]) -> float:
    return sum(values) / max(1, len(values))


@torch.no_grad()
def _renew_statistics(model: FasterRCNN, batches: Iterable[list[Sample]], device: torch.device) -> None:
    """Replace BatchNorm's moving statistics, of weights that moved, by the mean over ``batches``."""
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            module.reset_running_stats()
            module.momentum = None  # the plain mean
    torch.manual_seed(0)
    for batch in batches:
        if batch:
            _loss(model, batch, device)


@torch.no_grad()
def detect_objects(model: FasterRCNN, test: DetectionSet, work: Work) -> tuple[Rows, DetectionSet]:
    """Detect the objects of every test image, one image at a time.

    Returns rows of COCO's result format and the set of the images that could be read.
    """
    model.eval()
    rows: Rows = []
    readable = []
    keys: Iterator[list[tuple[int, bool]]] = ([(place, False)] for place in range(len(test.images)))
    stream = decoded(test.images, keys, work.workers, work.on_error)
    for batch in track(stream, len(test.images), "detecting", "images"):
        for sample in batch:
            (found,) = model([_pixels(sample, work.device)])
            readable.append(sample.image)
            boxes, labels, scores = (found[name].cpu() for name in ("boxes", "labels", "scores"))
            boxes[:, 2:] -= boxes[:, :2]
            rows += [
                {"image_id": sample.image.id, "category_id": test.category_ids[label - 1],
                 "bbox": [round(side, 2) for side in box], "score": round(score, 5)}
                for box, label, score in zip(boxes.tolist(), labels.tolist(), scores.tolist(), strict=True)
            ]  # fmt: skip
    return rows, replace(test, images=tuple(readable))
