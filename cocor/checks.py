"""Which values of a configuration are in bounds and go together. Each mistake is a line that names what to change."""

from itertools import pairwise

from cocor import cli
from cocor.cli import shown
from cocor.config import Config, key_bn_groups
from loaders.errors import UserError


def check(config: Config) -> None:
    """Raise a UserError for values out of bounds or at odds with each other."""
    cli.check_bounds(config)
    mistakes = {
        "label_fraction: 0 shows no label; use --mmnn constants for that": config.label_fraction <= 0,
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
            config.consistency != "none"
            and config.mmnn == "learned"
            and config.mmnn_wait_epochs + config.mmnn_warmup_epochs >= config.epochs
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
    """Raise a UserError if the batches cannot be shared out evenly among ``ranks`` processes."""
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
