"""Fine-tune the whole network with a share of the labels, as SimCLR does.

SGD with Nesterov momentum on random resized crops and flips, without decay (constants and sources:
:mod:`cocor.eval.datasets.protocols`). It learns from training and validation images, and is tested once, at the end.
"""

import copy
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cocor import checkpoint
from cocor.eval.datasets.protocols import FINETUNE, RANDOM_CROP_SCALE
from cocor.eval.datasets.splits import Splits
from cocor.eval.features import Extraction, encoded, evaluating
from cocor.step.optim import Cosine
from cocor.weights.load import Encoder
from loaders.datasets.dataset import ImageDataset
from loaders.datasets.labels import stratified_split
from loaders.errors import UserError
from loaders.progress import track
from loaders.views.order import BatchOrder
from loaders.views.plan import ViewPlan

_SAVE_SECONDS = 60.0
# Few labels make smaller batches, with rates in proportion, so that an epoch has 16 steps; BatchNorm needs some images.
_FEWEST_STEPS, _SMALLEST_BATCH = 16, 32


@dataclass(frozen=True)
class FinetuneSettings:
    """Share of the labels and recipe; rates are those of a batch of 256."""

    fraction: float
    epochs: int
    lr: float
    head_lr: float
    seed: int


@dataclass(frozen=True)
class FinetuneResult:
    """Test accuracies in [0, 1]; ``top5`` is None for five classes or fewer."""

    fraction: float
    top1: float
    top5: float | None
    train: int
    test: int
    classes: int
    epochs: int
    batch_size: int
    train_loss: float
    seconds: float

    def lines(self) -> list[str]:
        """Format the report for people."""
        top5 = "" if self.top5 is None else f", top-5 {self.top5:.2%}"
        what = f"{self.train:,} images, {self.epochs} epochs of batch {self.batch_size}, loss {self.train_loss:.4f}"
        return [f"{self.fraction:.3g} of the labels: top-1 {self.top1:.2%}{top5} ({what}; {self.seconds:.0f} s)"]


def finetune(
    encoder: Encoder, splits: Splits, settings: FinetuneSettings, how: Extraction, folder: Path, resume: bool
) -> FinetuneResult:
    """Fine-tune a copy of ``encoder`` on training and validation images, and test it.

    Checkpoints go to ``folder``, one a minute and at the end. With ``resume`` it continues from the newest, to the same
    result.

    Raises:
        UserError: the checkpoint is of other weights, settings or images, or the loss is no number.
    """
    began = time.perf_counter()
    learned = splits.learned_from()
    train = learned.subset(stratified_split(learned.labels, settings.fraction, settings.seed))
    training = _Training(encoder, train, settings, how, folder, resume)
    for _ in track(training.steps(), training.steps_left, f"fine-tuning on {settings.fraction:.3g}", "steps"):
        pass
    tuned = replace(encoder, backbone=training.model)
    top1, top5, tested = _test(tuned, splits.test, settings, how)
    sizes = len(train), tested, len(train.classes), settings.epochs, training.batch
    seconds = time.perf_counter() - began
    return FinetuneResult(
        settings.fraction, top1, top5 if len(train.classes) > 5 else None, *sizes, training.loss, seconds
    )  # fmt: skip


class _Training:
    """A network in training: encoder and a linear classifier on top."""

    def __init__(
        self, encoder: Encoder, train: ImageDataset, settings: FinetuneSettings, how: Extraction, folder: Path,
        resume: bool,
    ) -> None:  # fmt: skip
        self._settings, self._how, self._train, self._folder = settings, how, train, folder
        self._encoder = encoder
        self.batch = min(how.batch_size, len(train), max(_SMALLEST_BATCH, len(train) // _FEWEST_STEPS))
        self.model = _with_classifier(encoder, len(train.classes), how)
        parts = [list(part.parameters()) for part in self.model]
        scale, on_gpu = self.batch / 256, how.world.device.type == "cuda"
        self._rates = settings.lr * scale, settings.head_lr * scale
        groups = [{"params": part, "lr": rate} for part, rate in zip(parts, self._rates, strict=True)]
        self._optimiser = torch.optim.SGD(groups, momentum=FINETUNE.momentum, nesterov=True, fused=on_gpu)
        self._about = asdict(settings) | {"weights": encoder.digest, "images": train.digest, "batch": self.batch}
        self._about |= {"mean": list(encoder.mean), "std": list(encoder.std)}  # as files hold them
        self._epoch, self.loss = 0, float("nan")
        if resume:
            self._load()
        else:
            for old in folder.glob("step_*.pt"):
                old.unlink()

    @property
    def steps_left(self) -> int:
        """Count the steps of the epochs to come."""
        return (self._settings.epochs - self._epoch) * (len(self._train) // self.batch)

    def steps(self) -> Iterator[None]:
        """Train, and yield after every step."""
        how, settings, saved = self._how, self._settings, time.monotonic()
        plan = ViewPlan(
            how.size, settings.seed, (), original_scale=RANDOM_CROP_SCALE, lengths=(), filter=how.filter
        )  # fmt: skip
        order = BatchOrder(len(self._train), self.batch, seed=settings.seed)
        cosine = Cosine(settings.epochs * order.steps)
        loader = how.open_loader(self._train, plan, order, self._encoder.mean, self._encoder.std)
        with closing(loader):
            self.model.train()
            for epoch in range(self._epoch, settings.epochs):
                torch.manual_seed(settings.seed + epoch)  # of dropout, the same after --resume
                with closing(loader.epoch(epoch)) as batches:
                    for step, batch in enumerate(batches, start=epoch * order.steps):
                        loss = self._step(batch.original, batch.label, cosine(step))
                        yield
                self._epoch, self.loss = epoch + 1, loss.item()
                if not torch.isfinite(loss):
                    raise _diverged(settings)
                if time.monotonic() - saved > _SAVE_SECONDS or self._epoch == settings.epochs:
                    self._save()
                    saved = time.monotonic()

    def _step(self, images: Tensor, labels: Tensor, factor: float) -> Tensor:
        for group, rate in zip(self._optimiser.param_groups, self._rates, strict=True):
            group["lr"] = rate * factor
        with torch.autocast(images.device.type, self._how.precision, enabled=self._how.precision != torch.float32):
            logits = self.model(images)
        loss = F.cross_entropy(logits.float(), labels)
        self._optimiser.zero_grad()
        loss.backward()
        self._optimiser.step()
        return loss.detach()

    def _save(self) -> None:
        state = {"model": self.model.state_dict(), "optimiser": self._optimiser.state_dict(), "loss": self.loss}
        checkpoint.save(self._folder, {"step": self._epoch, "about": self._about, **state}, keep=1)

    def _load(self) -> None:
        found = checkpoint.newest(self._folder)
        if found is None:
            return
        path, state = found
        other = [name for name, value in self._about.items() if state["about"].get(name) != value]
        if other:
            raise UserError(f"--resume: {path} differs in {', '.join(other)}; leave --resume out to start anew")
        self.model.load_state_dict(state["model"])
        self._optimiser.load_state_dict(state["optimiser"])
        self._epoch, self.loss = state["step"], state["loss"]


def _with_classifier(encoder: Encoder, classes: int, how: Extraction) -> nn.Sequential:
    """Put a linear layer, at first zero, on a copy: (B, C, H, W) -> logits (B, C)."""
    backbone = copy.deepcopy(encoder.backbone).requires_grad_(True).to(how.world.device)
    with evaluating(backbone), torch.no_grad():
        width = backbone(torch.zeros(1, encoder.channels, how.size, how.size, device=how.world.device)).shape[1]
    head = nn.Linear(width, classes)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    model = nn.Sequential(backbone, head).to(how.world.device)
    return model.to(memory_format=torch.channels_last) if how.world.device.type == "cuda" else model


def _test(tuned: Encoder, test: ImageDataset, settings: FinetuneSettings, how: Extraction) -> tuple[float, float, int]:
    """Return top-1, top-5, and of how many labelled images that could be read."""
    test = test.subset((test.labels >= 0).nonzero()[0])
    labels, ranks = torch.from_numpy(test.labels.copy()), torch.full((len(test),), -1)
    with evaluating(tuned.backbone):
        for index, logits in encoded(tuned, test, how, "test images"):
            if not logits.isfinite().all():
                raise _diverged(settings)
            own = logits.gather(1, labels[index, None])
            ranks[index] = (logits > own).sum(1)
    ranks = ranks[ranks >= 0]
    return (ranks < 1).double().mean().item(), (ranks < 5).double().mean().item(), len(ranks)


def _diverged(settings: FinetuneSettings) -> UserError:
    return UserError(f"the loss is no number: lower --lr ({settings.lr:g}) or --head-lr ({settings.head_lr:g})")
