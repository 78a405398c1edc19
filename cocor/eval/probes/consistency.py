"""Measure the latent similarity of images and composites against its targets.

This is the paper's post-hoc figure (a), for several checkpoints side by side on the same views. For cocor's own
checkpoints the similarity is that of training, of embeddings behind the heads, but in evaluation mode, that is with the
running statistics of BatchNorm; other weights have no heads, so their backbone features are compared.

    DACL  = mean |similarity - g(composition)|          (paper, definition of the DA consistency level)
    order = do the mean similarities fall with length, and does g fall with every added augmentation?
"""

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from cocor import checkpoint
from cocor.config.options import BEFORE, Config
from cocor.distributed.collectives import World
from cocor.eval.features import Extraction, evaluating
from cocor.models import build_method
from cocor.objective.consistency import latent_similarity
from cocor.objective.mmnn import MMNN, Constants, by_length
from cocor.weights.load import load_encoder, normalisation
from loaders.datasets.dataset import ImageDataset
from loaders.errors import UserError
from loaders.progress import track
from loaders.views.ops import BASIC
from loaders.views.order import BatchOrder
from loaders.views.plan import ViewPlan

LENGTHS = tuple(range(1, 11))  # those of the paper's figure
_SINGLES = 4  # composites of length 1 for every image, so that each op gets enough samples
_BATCH = 64


@dataclass(frozen=True)
class Subject:
    """Maps from images, so normalised, to embeddings (N, d), and where their targets come from."""

    name: str
    space: str
    module: nn.Module
    original: Callable[[Tensor], Tensor]
    composite: Callable[[Tensor], Tensor]
    mmnn: MMNN | None
    constants: dict[int, float]
    mean: Sequence[float]
    std: Sequence[float]


@dataclass(frozen=True)
class Consistency:
    """Means over images by length, of similarity also by augmentation (``by_op``).

    ``rises``: how many lengths have a higher similarity than the one before; ``target_rises``: in how many of
    ``target_checks`` cases g does not fall when one augmentation is added.
    """

    name: str
    space: str
    targets: str
    images: int
    similarity: dict[int, float]
    target: dict[int, float]
    dacl: dict[int, float]
    by_op: dict[str, float]
    rises: int
    target_rises: int
    target_checks: int

    def lines(self) -> list[str]:
        """Format the report for people."""
        dacl = sum(self.dacl.values()) / len(self.dacl)
        rows = [f"{self.name} ({self.space}, {self.images:,} images; targets: {self.targets})"]
        rows.append("  length      " + " ".join(f"{length:>6}" for length in self.similarity))
        for title, row in (("similarity", self.similarity), ("target", self.target), ("DACL", self.dacl)):
            rows.append(f"  {title:<11} " + " ".join(f"{value:6.3f}" for value in row.values()))
        hardest = sorted(self.by_op, key=lambda op: self.by_op[op])
        ops = ", ".join(f"{op} {self.by_op[op]:.3f}" for op in hardest)
        rows.append(f"  by augmentation, least alike first: {ops}")
        targets = f"targets rise in {self.target_rises} of {self.target_checks} cases"
        order = f"similarity rises at {self.rises} of {len(self.similarity) - 1} lengths; {targets}"
        return [*rows, f"  mean DACL {dacl:.3f}; {order}"]


def subject(path: str | Path, device: torch.device, **encoder_options: Any) -> Subject:
    """Load a checkpoint of cocor, or of a run's folder, or else a bare encoder."""
    found = _checkpoint(Path(path))
    if found is None:
        encoder = load_encoder(path, **encoder_options)
        backbone = encoder.backbone.to(device)
        constants = by_length(Config.constants)
        of_pixels = encoder.mean, encoder.std
        return Subject(encoder.name, "backbone features", backbone, backbone, backbone, None, constants, *of_pixels)
    file, state = found
    if encoder_options.get("which") == "ema":
        raise UserError(f"--which ema: {file} is compared as in training, behind its heads; leave the flag out")
    known = {key: value for key, value in state["config"].items() if key in Config.__dataclass_fields__}
    config = Config(**(BEFORE | known | {"init": None, "constants": tuple(known["constants"])}))
    method = build_method(config, World(0, 0, 1, device))
    method.load_state_dict(state["training"]["method"])
    mmnn = None
    constants = dict(enumerate(config.constants, start=1))
    if "mmnn" in state["training"]:
        mmnn = MMNN(constants, config.mmnn_shape, config.mmnn_layers)
        mmnn.load_state_dict(state["training"]["mmnn"])
        mmnn.to(device)
    name = file.parent.parent.name or file.stem
    given = normalisation(config.in_chans, encoder_options.get("mean"), encoder_options.get("std"))
    of_pixels = given.get("mean", config.mean), given.get("std", config.std)
    embed = method.embed_original, method.embed_composite
    return Subject(name, "embeddings", method, *embed, mmnn, constants, *of_pixels)


def _checkpoint(path: Path) -> tuple[Path, dict[str, Any]] | None:
    """Read cocor's own checkpoint at ``path`` or, in a run's folder, the newest; None for anything else."""
    if path.is_dir():
        return checkpoint.newest(path / checkpoint.FOLDER)
    if path.parent.name != checkpoint.FOLDER or path.suffix != ".pt":
        return None
    return path, checkpoint.load(path)


def measure(subjects: Sequence[Subject], dataset: ImageDataset, how: Extraction, seed: int = 0) -> list[Consistency]:
    """Measure all ``subjects`` on the same views of ``dataset``, leaving no trace.

    The targets of a subject without MMNN are those of the first subject that has one, else its constants.
    """
    shared = next((s for s in subjects if s.mmnn is not None), None)
    plan = ViewPlan(size=how.size, seed=seed, contrastive=(), original="shared", lengths=(1,) * _SINGLES + LENGTHS[1:])
    results = []
    for one in subjects:
        source = one if one.mmnn is not None else shared
        target: nn.Module = Constants(one.constants).to(how.world.device)
        named = "the constants"
        if source is not None and source.mmnn is not None:
            target, named = source.mmnn, "its MMNN" if source is one else f"the MMNN of {source.name}"
        results.append(_summarise(one, named, target, *_similarities(one, target, plan, dataset, how)))
    return results


@torch.no_grad()
def _similarities(
    one: Subject, target: nn.Module, plan: ViewPlan, dataset: ImageDataset, how: Extraction
) -> tuple[Tensor, Tensor, Tensor]:
    """Return similarities (L, N), targets (L, N) and compositions (L, N, 14) of all composites, on the CPU."""
    order = BatchOrder(len(dataset), min(_BATCH, how.batch_size), shuffle=False, drop_last=False)
    device = how.world.device
    loader = how.open_loader(dataset, plan, order, one.mean, one.std)
    found: list[tuple[Tensor, Tensor, Tensor]] = []
    with closing(loader), closing(loader.epoch(0)) as batches, evaluating(one.module):
        for batch in track(batches, len(dataset), f"consistency of {one.name}", "images", order.batch_size):
            with torch.autocast(device.type, how.precision, enabled=how.precision != torch.float32):
                originals = one.original(batch.original)
                composites = torch.stack([one.composite(views) for views in batch.composites])
            similarity = latent_similarity(composites.float(), originals.float())
            found.append((similarity.cpu(), target(batch.composition).cpu(), batch.composition.cpu()))
    similarity, wanted, composition = (torch.cat(parts, dim=1) for parts in zip(*found, strict=True))
    return similarity.double(), wanted.double(), composition


def _summarise(
    one: Subject, targets: str, target: nn.Module, similarity: Tensor, wanted: Tensor, composition: Tensor
) -> Consistency:
    size, singles = composition.sum(-1), composition.sum(-1) == 1
    ops = composition[singles].argmax(-1)
    by_op = {op.label: similarity[singles][ops == place].mean().item()
             for place, op in enumerate(BASIC) if (ops == place).any()}  # fmt: skip

    def means(values: Tensor) -> dict[int, float]:
        return {length: values[size == length].mean().item() for length in sorted(size.unique().tolist())}

    similar, images = means(similarity), similarity.shape[1]
    rises = sum(later > earlier for earlier, later in pairwise(similar.values()))
    by_length = similar, means(wanted), means((similarity - wanted).abs())
    checks = target_rises(target, composition.flatten(0, 1))
    return Consistency(one.name, one.space, targets, images, *by_length, by_op, rises, *checks)


@torch.no_grad()
def target_rises(target: nn.Module, composition: Tensor) -> tuple[int, int]:
    """Count where ``target`` does not fall as an augmentation joins a composition.

    Returns (violations, cases).
    """
    device = next((t.device for t in (*target.parameters(), *target.buffers())), torch.device("cpu"))
    rows = composition.unique(dim=0).to(device)
    more = rows[:, None] + torch.eye(len(BASIC), dtype=rows.dtype, device=device)
    return int((target(more) >= target(rows)[:, None]).sum()), rows.shape[0] * len(BASIC)
