"""Which values of a configuration are in bounds and go together. Each mistake is one line that names what to change.

A flag that has no effect with the run's other settings is worth a warning, as the user expects one; no more than that,
as the same flags may be given to unlike runs. Keys of a config file get no warning: a file serves several runs, and
other flags may make use of them.
"""

from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import NamedTuple

from cocor.config.arguments import flag
from cocor.config.options import Config, key_bn_groups
from cocor.config.values import check_bounds, shown
from loaders.errors import UserError


class Need(NamedTuple):
    """A condition (``met``; in words ``where``) without which the options ``keys`` have no effect."""

    keys: tuple[str, ...]
    where: str
    met: Callable[[Config], bool]


def _method(key: str, *methods: str) -> Need:
    return Need((key,), f"with --method {'|'.join(methods)}", lambda c: c.method in methods)


_MMNN = (
    *("hypergradient", "mmnn_every", "mmnn_lr", "mmnn_momentum", "mmnn_wait_epochs", "mmnn_warmup_epochs"),
    *("classifier_lr", "classifier_weight_decay", "labelled_batch_size", "label_split", "label_fraction"),
)
_CONSISTENCY = (
    *("consistency_weight", "consistency_beta", "lengths", "lengths_per_step", "composite_size", "pool", "magnitudes"),
    *("composite_order", "recipe", "released_originals", "mmnn", "constants", *_MMNN),
)
_KNN = ("val_data", "knn_k", "knn_temperature")

NEEDS = (
    Need(
        ("data", "labels", "label_split", "label_fraction", "on_error", "knn_every", *_KNN),
        "with a --loader that reads images",
        lambda c: c.loader != "synthetic",
    ),
    Need(("synthetic_images",), "with --loader synthetic", lambda c: c.loader == "synthetic"),
    Need(("hw_decoder_load",), "with --loader dali on GPUs", lambda c: c.loader == "dali" and c.gpus != 0),
    Need(_KNN, "with --knn-every above 0", lambda c: c.knn_every > 0),
    Need(
        ("labels",),
        "with --mmnn learned, --method supcon or --knn-every above 0",
        lambda c: c.method == "supcon" or c.knn_every > 0 or (c.consistency != "none" and c.mmnn == "learned"),
    ),
    Need(("force_data", "force_ranks"), "with --resume", lambda c: c.resume is not None),
    Need(("init",), "where no checkpoint is named to --resume", lambda c: c.resume in (None, "auto")),
    _method("queue_size", "moco"),
    _method("key_bn_splits", "moco"),
    _method("temperature", "moco", "supcon"),
    _method("key_momentum", "moco", "byol"),
    _method("embedding_dim", "moco", "supcon", "byol", "intl"),
    _method("projector_dim", "simsiam", "byol", "intl"),
    _method("predictor_dim", "simsiam", "byol"),
    _method("fix_predictor_lr", "simsiam"),
    _method("whitening_iterations", "intl"),
    _method("trace_weight", "intl"),
    Need(
        ("decay_biases",),
        "with --weight-decay above 0 or --optimiser lars",
        lambda c: c.weight_decay > 0 or c.optimiser == "lars",
    ),
    Need(_CONSISTENCY, "with --consistency softplus|abs", lambda c: c.consistency != "none"),
    Need(("consistency_beta",), "with --consistency softplus", lambda c: c.consistency == "softplus"),
    Need(("composite_order",), "with --lengths above 1", lambda c: max(c.lengths) > 1),
    Need(("released_originals",), "with --recipe released", lambda c: c.recipe == "released"),
    Need(_MMNN, "with --mmnn learned", lambda c: c.mmnn == "learned"),
    Need(("label_fraction",), "without --label-split", lambda c: c.label_split is None),
    Need(("brightness", "contrast", "saturation", "hue"), "with --jitter-prob above 0", lambda c: c.jitter_prob > 0),
    Need(("blur_sigma",), "with --blur-prob above 0", lambda c: max(c.blur_prob) > 0),
    Need(
        ("max_restarts",),
        "on several ranks: --gpus above 1, or --gpus 0 and --cpu-ranks above 1",
        lambda c: c.gpus is None or c.gpus > 1 or c.cpu_ranks > 1,
    ),
    Need(("profile",), "without --dry-run", lambda c: not c.dry_run),
)
_WHERE_OTHERS_LAUNCH = Need(
    ("max_restarts",),
    "where cocor-train starts the ranks itself, not torchrun (which has a flag of this name) or srun",
    lambda c: False,
)


def warnings(config: Config, keys: Iterable[str], launched: bool = False) -> list[str]:
    """One line for each flag of the command line (``keys``) whose value has no effect in the resulting ``config``.

    Values of 0, false or none ask for nothing and get no line. ``--dry-run`` and ``--profile`` count as the run that
    they look at. ``launched``: torchrun or srun has started the ranks.
    """
    needs = (_WHERE_OTHERS_LAUNCH, *NEEDS) if launched else NEEDS
    unmet = [need for need in needs if not need.met(config)]
    idle = {
        key: reasons[0]
        for key in keys
        if getattr(config, key) and (reasons := [need.where for need in unmet if key in need.keys])
    }
    return [f"{flag(key)} has no effect: it acts only {where}" for key, where in idle.items()]


def check(config: Config) -> None:
    """Raise a UserError for values out of bounds or at odds with each other."""
    check_bounds(config)
    learned = config.consistency != "none" and config.mmnn == "learned"
    mistakes = {
        "label_fraction: 0 shows no label; use --mmnn constants for that": (
            learned and config.label_split is None and config.label_fraction == 0
        ),
        f"lengths: {config.lengths} names a length twice": len(set(config.lengths)) < len(config.lengths),
        f"lengths_per_step: {config.lengths_per_step} is more than there are in --lengths {shown(config.lengths)}": (
            config.lengths_per_step > len(config.lengths)
        ),
        f"composite_size: {config.composite_size} is no size between {-(-config.image_size // 16)} and the "
        f"{config.image_size} of --image-size; 0 leaves composites as they are": (
            config.composite_size != 0 and not config.image_size <= 16 * config.composite_size <= 16 * config.image_size
        ),
        f"blur_sigma: {config.blur_sigma} must rise": config.blur_sigma[0] > config.blur_sigma[1],
        f"constants: {config.constants} must fall": any(a <= b for a, b in pairwise(config.constants)),
        f"warmup_epochs: {config.warmup_epochs} leaves nothing of {config.epochs} epochs; lower it or raise epochs": (
            config.warmup_epochs >= config.epochs
        ),
        f"mmnn_wait_epochs: {config.mmnn_wait_epochs} and mmnn_warmup_epochs: {config.mmnn_warmup_epochs} leave "
        f"nothing of {config.epochs} epochs; lower them, raise epochs, or use --mmnn constants": (
            learned and config.mmnn_wait_epochs + config.mmnn_warmup_epochs >= config.epochs
        ),
        f"queue_size: {config.queue_size} is less than one batch ({config.batch_size})": (
            config.method == "moco" and config.queue_size < config.batch_size
        ),
        f"blur_prob: {config.blur_prob}: one value, or one for each of the 2 views": len(config.blur_prob) > 2,
        f"solarize_prob: {config.solarize_prob}: one value, or one for each of the 2 views": (
            len(config.solarize_prob) > 2
        ),
        "--overwrite and --resume exclude each other": config.overwrite and config.resume is not None,
        f"--execution {config.execution}: forward derivatives cannot be compiled; use auto with --consistency abs": (
            config.consistency == "abs" and config.execution in ("compiled", "fused")
        ),
        f"--execution {config.execution}: LARS cannot be recorded; use compiled with --optimiser lars": (
            config.optimiser == "lars" and config.execution in ("graph", "fused")
        ),
        "--cpu-ranks needs --gpus 0": config.cpu_ranks > 1 and bool(config.gpus),
    }
    for message, wrong in mistakes.items():
        if wrong:
            raise UserError(message)
    check_ranks(config, config.gpus or config.cpu_ranks)


def check_ranks(config: Config, ranks: int) -> None:
    """Raise a UserError if the batches cannot be split evenly among ``ranks`` processes, or if an option of the method
    does not work on so many."""
    for key in ("batch_size", "labelled_batch_size"):
        size = getattr(config, key)
        if size % ranks:
            raise UserError(f"{key}: {size} is no multiple of the {ranks} ranks; try {-(-size // ranks) * ranks}")
        if size and size // ranks < 2:
            raise UserError(f"{key}: {size} on {ranks} ranks is {size // ranks} each; BatchNorm needs 2")
    if config.method == "intl" and config.batch_size >= config.embedding_dim:
        raise UserError(
            f"embedding_dim: INTL whitens the {config.batch_size} images of a batch among each other, which takes more "
            f"dimensions than images, not {config.embedding_dim}; raise embedding_dim or lower batch_size"
        )
    derives = config.consistency == "abs" and config.mmnn == "learned" and config.hypergradient == "exact"
    if derives and config.sync_bn and ranks > 1:
        raise UserError(
            "sync_bn: consistency abs needs forward derivatives, which synchronised BatchNorm lacks; "
            "use --hypergradient taylor, --consistency softplus or --no-sync-bn"
        )
    local = config.batch_size // ranks
    groups = key_bn_groups(config, ranks)
    if config.method == "moco" and (local % groups or local // groups < 2):
        fitting = max(n for n in range(1, groups + 1) if local % n == 0 and local // n >= 2)
        raise UserError(
            f"key_bn_splits: {config.key_bn_splits} does not cut a batch of {config.batch_size} on {ranks} ranks into "
            f"equal groups of 2 or more; try {fitting * ranks}"
        )
