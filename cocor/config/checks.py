"""Validate options and their combinations, naming what to change in one line.

A flag that the other settings make irrelevant is a warning. Keys of a config file get none, as a file serves
several runs.
"""

from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from typing import Any, NamedTuple

from cocor.auxiliary import AUXILIARIES
from cocor.config.options import Config
from cocor.config.parse import check_bounds, flag, shown
from cocor.methods import METHODS, method_class, owners, spec
from loaders.errors import UserError


class Need(NamedTuple):
    """A condition ``met`` (in words ``where``) without which ``keys`` are idle."""

    keys: tuple[str, ...]
    where: str
    met: Callable[[Config], bool]


_MMNN = (
    *("hypergradient", "mmnn_every", "mmnn_shape", "mmnn_layers", "mmnn_optimiser", "mmnn_lr", "mmnn_momentum"),
    *("mmnn_wait_epochs", "mmnn_warmup_epochs", "classifier_lr", "classifier_weight_decay"),
    *("labelled_batch_size", "label_split", "label_fraction", "shuffle_labels"),
)
_CONSISTENCY = ("preset", "consistency_weight", "consistency_beta", "consistency_sign", "mmnn", "constants", *_MMNN)
_COMPOSITES = (
    *("lengths", "lengths_per_step", "composite_size", "pool", "magnitudes", "composite_order", "recipe"),
    "released_originals",
)
_HELD_OUT = ("val_data", "knn_every", "probe_every")
_KNN = ("knn_k", "knn_temperature")
_IMAGES = ("data", "verify_data", "labels", "label_split", "label_fraction", "on_error", *_HELD_OUT, *_KNN)

NEEDS = (
    Need(_IMAGES, "with a --loader that reads images", lambda c: c.loader != "synthetic"),
    Need(("synthetic_images",), "with --loader synthetic", lambda c: c.loader == "synthetic"),
    Need(("hw_decoder_load",), "with --loader dali on GPUs", lambda c: c.loader == "dali" and c.gpus != 0),
    Need(_KNN, "with --knn-every above 0", lambda c: c.knn_every > 0),
    Need(("val_data",), "with --knn-every or --probe-every above 0", lambda c: c.knn_every + c.probe_every > 0),
    Need(("force_data", "force_ranks"), "with --resume", lambda c: c.resume is not None),
    Need(("init",), "where no checkpoint is named to --resume", lambda c: c.resume in (None, "auto")),
    Need(("decay_biases",), "with --optimiser lars, or sgd and --weight-decay above 0",
         lambda c: c.optimiser == "lars" or (c.optimiser == "sgd" and c.weight_decay > 0)),
    Need(_CONSISTENCY, "with --consistency softplus|abs", lambda c: c.consistency != "none"),
    Need(_COMPOSITES, "with --consistency softplus|abs or an --auxiliary of composites", lambda c: c.has_composites),
    Need(("consistency_beta",), "with --consistency softplus and targets",
         lambda c: c.consistency == "softplus" and c.mmnn != "none"),
    Need(("constants",), "with --mmnn learned|constants", lambda c: c.mmnn != "none"),
    Need(("composite_order",), "with --lengths above 1", lambda c: max(c.lengths) > 1),
    Need(("released_originals",), "with --recipe released", lambda c: c.recipe == "released"),
    Need(_MMNN, "with --mmnn learned", lambda c: c.mmnn == "learned"),
    Need(("label_fraction",), "without --label-split", lambda c: c.label_split is None),
    Need(("brightness", "contrast", "saturation", "hue"), "with --jitter-prob above 0", lambda c: c.jitter_prob > 0),
    Need(("blur_sigma",), "with --blur-prob above 0", lambda c: max(c.blur_prob) > 0),
    Need(("max_restarts",), "on several ranks: --gpus above 1, or --gpus 0 and --cpu-ranks above 1",
         lambda c: c.gpus is None or c.gpus > 1 or c.cpu_ranks > 1),
    Need(("profile",), "without --dry-run", lambda c: not c.dry_run),
)  # fmt: skip
_OWN = "where cocor-train starts the ranks itself, not torchrun (which has a flag of this name) or srun"
_WHERE_OTHERS_LAUNCH = Need(("max_restarts",), _OWN, lambda c: False)


def needs() -> list[Need]:
    """Return the conditions of all options, those of the methods' own among them."""
    by_labels = [method for method in METHODS if spec(method).needs_labels]
    labels = Need(
        ("labels",),
        f"with --mmnn learned, --method {'|'.join(by_labels)} or --knn-every or --probe-every above 0",
        lambda c: c.method in by_labels or c.knn_every + c.probe_every > 0 or c.learns_targets,
    )
    return [*NEEDS, labels, *_of_owners("method", METHODS), *_of_owners("auxiliary", AUXILIARIES)]


def _of_owners(choice: str, table: Mapping[str, Any]) -> list[Need]:
    """Return the conditions of options that are for some values of ``choice`` only."""

    def need(key: str, names: list[str]) -> Need:
        return Need((key,), f"with {flag(choice)} {'|'.join(names)}", lambda c: getattr(c, choice) in names)

    return [need(key, names) for key, names in owners(table).items()]


def warnings(config: Config, keys: Iterable[str], launched: bool = False) -> list[str]:
    """Name the flags among ``keys`` without effect in ``config``, a line each.

    Values of 0, false or none ask for nothing and get no line. ``--dry-run`` and ``--profile`` count as the run that
    they look at. ``launched``: torchrun or srun has started the ranks.
    """
    unmet = [need for need in needs() if not need.met(config)]
    if launched:
        unmet.insert(0, _WHERE_OTHERS_LAUNCH)
    idle = {
        key: reasons[0]
        for key in keys
        if getattr(config, key) and (reasons := [need.where for need in unmet if key in need.keys])
    }
    lines = [f"{flag(key)} has no effect: it acts only {where}" for key, where in idle.items()]
    if "backbone" in keys and "." in config.backbone and config.init is None:
        name = config.backbone
        lines.append(f"--backbone {name}: training starts at random; --init timm:{name} starts from these weights")
    return lines


def check(config: Config) -> None:
    """Raise a UserError for values out of bounds or at odds with each other."""
    check_bounds(config)
    c, learned, on_16 = config, config.learns_targets, -(-config.image_size // 16)
    mistakes = {
        "label_fraction: 0 shows no label; use --mmnn constants for that":
            learned and c.label_split is None and c.label_fraction == 0,
        f"in_chans: {c.in_chans}: a view has three planes of 8 bits; write three bands of the images as RGB for 3, or "
        "one as grey for 1": c.in_chans not in (1, 3),
        f"mean: {shown(c.mean)} and std: {shown(c.std)} must have one value each, or one for each of --in-chans "
        f"{c.in_chans}": not len(c.mean) == len(c.std) == c.in_chans,
        f"lengths: {c.lengths} names a length twice": len(set(c.lengths)) < len(c.lengths),
        f"lengths_per_step: {c.lengths_per_step} is more than there are in --lengths {shown(c.lengths)}":
            c.lengths_per_step > len(c.lengths),
        f"composite_size: {c.composite_size} is no size between {on_16} and the {c.image_size} of --image-size; "
        "0 leaves composites as they are": c.composite_size != 0 and not on_16 <= c.composite_size <= c.image_size,
        f"blur_sigma: {c.blur_sigma} must rise": c.blur_sigma[0] > c.blur_sigma[1],
        f"constants: {c.constants} must fall": any(a <= b for a, b in pairwise(c.constants)),
        f"warmup_epochs: {c.warmup_epochs} leaves nothing of {c.epochs} epochs; lower it or raise epochs":
            c.warmup_epochs >= c.epochs,
        f"mmnn_wait_epochs: {c.mmnn_wait_epochs} and mmnn_warmup_epochs: {c.mmnn_warmup_epochs} leave nothing of "
        f"{c.epochs} epochs; lower them, raise epochs, or use --mmnn constants":
            learned and c.mmnn_wait_epochs + c.mmnn_warmup_epochs >= c.epochs,
        f"blur_prob: {c.blur_prob}: one value, or one for each of the 2 views": len(c.blur_prob) > 2,
        f"solarize_prob: {c.solarize_prob}: one value, or one for each of the 2 views": len(c.solarize_prob) > 2,
        "--overwrite and --resume exclude each other": c.overwrite and c.resume is not None,
        f"--execution {c.execution}: forward derivatives cannot be compiled; use auto with --consistency abs":
            c.consistency == "abs" and c.execution in ("compiled", "fused"),
        f"--execution {c.execution}: LARS cannot be recorded; use compiled with --optimiser lars":
            c.optimiser == "lars" and c.execution in ("graph", "fused"),
        "clip_grad: LARS sets the size of each weight's step itself; leave it out, or use --optimiser sgd or adamw":
            c.optimiser == "lars" and c.clip_grad > 0,
        "accumulate: --consistency abs and --hypergradient taylor|released need the whole batch again; use softplus "
        "and exact, or --mmnn constants":
            c.accumulate > 1 and learned and (c.consistency == "abs" or c.hypergradient != "exact"),
        f"accumulate: --auxiliary {c.auxiliary} takes the whole batch at once":
            c.accumulate > 1 and c.auxiliary != "none",
        f"hypergradient: {c.hypergradient} compares losses that --auxiliary {c.auxiliary} is no part of; use exact":
            learned and c.hypergradient != "exact" and c.auxiliary != "none",
        "--mmnn none pulls alike on all views, which is no --consistency abs; leave that out":
            c.consistency == "abs" and c.mmnn == "none",
        "--consistency-sign printed turns the softplus of a target round; leave it out with --consistency abs and "
        "--mmnn none": c.consistency_sign == "printed" and (c.consistency == "abs" or c.mmnn == "none"),
        f"--keep-best {c.keep_best} needs --{c.keep_best}-every above 0":
            c.keep_best != "none" and not getattr(c, f"{c.keep_best}_every"),
        "--cpu-ranks needs --gpus 0": c.cpu_ranks > 1 and bool(c.gpus),
    }  # fmt: skip
    for message, wrong in mistakes.items():
        if wrong:
            raise UserError(message)
    check_ranks(config, config.gpus or config.cpu_ranks)


def check_ranks(config: Config, ranks: int) -> None:
    """Raise a UserError for batches or options that do not fit so many ranks."""
    for key in ("batch_size", "labelled_batch_size"):
        size = getattr(config, key)
        if size % ranks:
            raise UserError(f"{key}: {size} is no multiple of the {ranks} ranks; try {-(-size // ranks) * ranks}")
        if size and size // ranks < 2:
            raise UserError(f"{key}: {size} on {ranks} ranks is {size // ranks} each; BatchNorm needs 2")
    derives = config.consistency == "abs" and config.mmnn == "learned" and config.hypergradient == "exact"
    if derives and config.sync_bn and ranks > 1:
        remedy = "use --hypergradient taylor, --consistency softplus or --no-sync-bn"
        raise UserError(f"sync_bn: consistency abs needs derivatives that synchronised BatchNorm lacks; {remedy}")
    method, parts, local = method_class(config.method), config.accumulate, config.batch_size // ranks
    if parts > 1 and not method.accumulates:
        fitting = "|".join(name for name in METHODS if method_class(name).accumulates)
        raise UserError(f"accumulate: {config.method} compares the images of a batch, not of a part; use {fitting}")
    if parts > 1 and (local % parts or local // parts < 2):
        raise UserError(f"accumulate: the {local} images of a rank are not {parts} equal parts of 2 or more")
    method.check(config, ranks)
    method_class(config.auxiliary, AUXILIARIES).check(config)
