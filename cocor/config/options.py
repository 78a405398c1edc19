"""Define the options of a pre-training run: one flat, frozen dataclass.

Its fields are the keys of YAML files and the flags of ``cocor-train``. :mod:`cocor.config.resolve` makes one of these,
:mod:`cocor.config.checks` says which values go together. What depends on the machine (GPUs, precision, worker threads)
is settled later, by :func:`cocor.distributed.launch.settle`.
"""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from cocor.auxiliary import AUXILIARIES
from cocor.config.parse import option
from cocor.methods import METHODS, spec
from loaders.channels import IMAGENET_MEAN, IMAGENET_STD
from loaders.files import write_text
from loaders.views.ops import POOLS, Magnitudes, Order
from loaders.views.plan import Kept

Loader = Literal["dali", "torch", "synthetic", "ffcv"]
Consistency = Literal["softplus", "abs", "none"]
Tracker = Literal["tensorboard", "wandb", "mlflow"]
Execution = Literal["auto", "eager", "compiled", "graph", "fused"]

# Options that --preset sets, over the method's own. Which are best depends on the method, so "tuned" leaves them to it.
PRESETS: dict[str, dict[str, Any]] = {"tuned": {}, "paper": {"consistency_weight": 1.0, "consistency_beta": 1.0}}


@dataclass(frozen=True)
class Config:
    """Options of a run, as ``cocor-train --help`` describes them; see ``configure``."""

    # Data and output
    data: Path | None = option(None, "images: class folders, or train/ and val/ of such; a flat folder; a .beton file")
    val_data: Path | None = option(None, "held-out images on which k-NN is measured; default: val or test in --data")
    labels: Path | None = option(None, "label file of a flat folder: one `file label` a line")
    label_split: Path | None = option(None, "which images may show their labels to the MMNN, written by cocor-prep")
    label_fraction: float = option(0.01, "share of labels shown to the MMNN without --label-split", low=0, high=1)
    loader: Loader = option("dali", "who reads and decodes")
    synthetic_images: int = option(51200, "images in an epoch of --loader synthetic", low=1, high=10**8)
    on_error: Literal["stop", "skip"] = option("stop", "at files that cannot be read; skip: others take their place")
    output: Path = option(Path("runs/moco"), "folder of the run")
    overwrite: bool = option(False, "empty the output folder first")
    resume: str | None = option(None, "checkpoint to go on from; bare or `auto`: the newest in --output", bare="auto")
    verify_data: bool = option(False, "read all images first: their contents are kept in checkpoints, and compared")
    force_data: bool = option(False, "resume although the images are not those of the checkpoint")
    force_ranks: bool = option(False, "resume on another number of GPUs although BatchNorm then sees other batches")
    init: Path | None = option(None, "encoder to start from: weights that cocor-eval reads, a run, or timm:NAME")

    # Model and optimisation
    method: str = option("moco", "contrastive method", choices=METHODS)
    backbone: str = option("resnet50", "timm name of the encoder; a tag loads no weights, see --init")
    stem: Literal["imagenet", "small"] = option(
        "imagenet", "first layers; small: 3x3 stride 1, no pooling (CIFAR), or a transformer's patches of 4 pixels"
    )
    image_size: int = option(224, "side of every view in pixels", low=8, high=4096)
    in_chans: int = option(3, "channels of images for the encoder; 1: grey", low=1)
    mean: tuple[float, ...] = option(
        IMAGENET_MEAN, "of pixels from 0 to 1, to normalise them: a value a channel, or one", low=0, high=1
    )
    std: tuple[float, ...] = option(IMAGENET_STD, "their deviation; cocor-prep info measures both", low=1e-3, high=1)
    epochs: int = option(200, "passes over the data", low=1, high=10**6)
    batch_size: int = option(256, "images a step, over all GPUs", low=2, high=2**20)
    labelled_batch_size: int = option(0, "labelled ones, over all GPUs; 0: a quarter of the batch", low=0, high=2**20)
    accumulate: int = option(1, "equal parts of each GPU's batch that go through the networks one by one", low=1)
    lr: float = option(0.03, "learning rate at this batch size, never rescaled; cosine to 0", low=0)
    final_lr: float = option(0.0, "learning rate at the end, as a share of --lr", low=0, high=1)
    optimiser: Literal["sgd", "lars", "adamw"] = option(
        "sgd", "of encoder and heads; adamw: with --lr 1.5e-4 --weight-decay 0.1, if these are not given"
    )
    momentum: float = option(0.9, "its momentum; AdamW's first beta", low=0, high=1)
    weight_decay: float = option(1e-4, "weight decay of the encoder and heads", low=0)
    decay_biases: bool = option(True, "weight decay, and LARS, also for biases and normalisation")
    clip_grad: float = option(0.0, "largest norm of the whole gradient, which is scaled down to it; 0: any", low=0)
    warmup_epochs: int = option(0, "epochs of linear warm-up", low=0)
    sync_bn: bool = option(False, "BatchNorm over the batches of all GPUs")
    fix_predictor_lr: bool = option(True, "keep the predictor's learning rate constant")

    # Methods; each method class lists the options that it uses
    queue_size: int = option(65536, "keys in the queue", low=1, high=2**24)
    key_bn_splits: int = option(8, "groups of the global batch for the keys' BatchNorm", low=1, high=2**20)
    symmetric: bool = option(False, "each view is the query once and the key once; twice the passes")
    temperature: float = option(0.2, "temperature", low=1e-3)
    key_momentum: float = option(0.999, "momentum of the second encoder; BYOL's rises to 1", low=0, high=1)
    embedding_dim: int = option(128, "dimension of embeddings", low=1, high=2**16)
    projector_dim: int = option(2048, "hidden width of the projector; SimSiam: also its output", low=1, high=2**16)
    projector_layers: int = option(3, "layers of the projector; SimSiam's authors have 2 on CIFAR-10", low=2, high=3)
    predictor_dim: int = option(512, "hidden width of the predictor", low=1, high=2**16)
    whitening_iterations: int = option(4, "steps of iterative normalisation", low=1, high=20)
    trace_weight: float | None = option(None, "weight of the trace loss", low=0)
    redundancy_weight: float = option(0.0051, "weight of correlations between different dimensions", low=0)
    invariance_weight: float = option(25.0, "weight of the distance between two views", low=0)
    variance_weight: float = option(25.0, "weight of the hinge on each dimension's deviation", low=0)
    covariance_weight: float = option(1.0, "weight of covariances between different dimensions", low=0)

    # CoCor
    preset: str = option(
        "tuned", "loss; tuned: as it won on CIFAR-10; paper: as printed, weight and beta 1", choices=PRESETS
    )
    consistency: Consistency = option("softplus", "consistency loss; none: the plain method")
    consistency_weight: float = option(1.0, "weight of the consistency loss", low=0)
    consistency_beta: float = option(1.0, "sharpness of the softplus", low=1e-3)
    consistency_sign: Literal["text", "printed"] = option(
        "text", "sign of the softplus; text: pulls views to their target; printed: pushes, as the paper's formula does"
    )
    lengths: tuple[int, ...] = option((1, 2, 3), "lengths of the composite augmentations", low=1, high=10)
    lengths_per_step: int = option(0, "lengths that a step trains on, in turn; 0: all", low=0)
    composite_size: int = option(0, "side of composites, scaled down, in pixels; 0: --image-size", low=0, high=4096)
    pool: str = option("all", "basic augmentations to draw from", choices=POOLS)
    magnitudes: Magnitudes = option("uniform", "their strengths; released: the authors' fixed level 10")
    composite_order: Order = option("random", "their order; fixed1: geometry first, fixed2: geometry last")
    recipe: Literal["paper", "released"] = option("paper", "composites on a shared plain crop, or as the released code")
    released_originals: int = option(5, "crops in the original of --recipe released, their mean", low=1, high=100)
    mmnn: Literal["learned", "constants", "none"] = option(
        "learned", "where the target similarities come from; none: a constant pull, without targets or labels"
    )
    mmnn_shape: Literal["monotone", "concave"] = option(
        "monotone", "what the MMNN can be; concave: the paper's, which falls ever faster with length"
    )
    mmnn_layers: int = option(2, 'its layers of weights; the paper\'s is "a 3-layer MLP"', low=2, high=3)
    # The default is that of the paper's table "Constant l_d*" for MoCo, which other methods than SimSiam take as well.
    constants: tuple[float, ...] = option((0.8, 0.75, 0.65), "targets of lengths 1, 2, 3; extrapolated", low=-1, high=1)
    hypergradient: Literal["exact", "taylor", "released"] = option(
        "exact", "the MMNN's gradient; taylor: the paper's, sign mended; released: as the authors' code has it"
    )
    mmnn_every: int = option(1, "steps from one in which the MMNN and its classifier learn to the next", low=1)
    mmnn_optimiser: Literal["adam", "normalised", "sgd"] = option(
        "adam",
        "of the MMNN; normalised: SGD; sgd: SGD whose steps shrink with --lr and --consistency-weight, as printed",
    )
    mmnn_lr: float = option(1e-3, "learning rate of the MMNN", low=0)
    mmnn_momentum: float = option(0.9, "momentum of the MMNN's SGD, or Adam's first", low=0, high=1)
    mmnn_wait_epochs: int = option(3, "epochs before the MMNN learns; in a run too short for it: 0", low=0)
    mmnn_warmup_epochs: int = option(2, "epochs of its linear warm-up thereafter", low=0)
    shuffle_labels: bool = option(False, "give the MMNN's images the labels of others, as a control")
    classifier_lr: float = option(0.4, "learning rate of the classifier that guides the MMNN", low=0)
    classifier_weight_decay: float = option(1e-4, "its weight decay", low=0)

    # Auxiliaries; each class lists the options that it uses
    auxiliary: str = option("none", "objective beside the method's, of a rival of CoCor", choices=AUXILIARIES)
    auxiliary_weight: float = option(1.0, "weight of its loss", low=0)
    auxiliary_pairs: Literal["views", "composites"] = option(
        "views", "what it compares: both contrastive views, or original and composites"
    )
    auxiliary_temperature: float = option(0.2, "temperature of its loss", low=1e-3)
    renyi_order: float = option(2.0, "order of the Renyi divergence", low=1)
    looc_kept: tuple[Kept, ...] = option(("crop", "color"), "parts of the first view that a head each is to tell apart")
    augself_targets: tuple[Literal["crop", "color", "blur", "flip", "grey"], ...] = option(
        ("crop", "color"), "differences of views to predict"
    )

    # Contrastive views
    crop_scale_min: float = option(0.2, "least share of the image's area in a random crop", low=1e-3, high=1)
    brightness: float = option(0.4, "strength of the brightness jitter", low=0)
    contrast: float = option(0.4, "strength of the contrast jitter", low=0)
    saturation: float = option(0.4, "strength of the saturation jitter", low=0)
    hue: float = option(0.1, "strength of the hue jitter", low=0, high=0.5)
    jitter_prob: float = option(0.8, "probability of the colour jitter", low=0, high=1)
    grayscale_prob: float = option(0.2, "probability of grey", low=0, high=1)
    blur_prob: tuple[float, ...] = option((0.5,), "probability of the Gaussian blur, or of each view's", low=0, high=1)
    blur_sigma: tuple[float, float] = option((0.1, 2.0), "range of its sigma in pixels", low=0.01, high=10)
    solarize_prob: tuple[float, ...] = option((0.0,), "probability of solarising, or of each view's", low=0, high=1)

    # Machine
    gpus: int | None = option(None, "GPUs of this machine to use; 0: none, train on the CPU", low=0, high=1024)
    max_restarts: int = option(0, "times that --gpus N starts all ranks again after one has died", low=0)
    cpu_ranks: int = option(1, "processes to train with when there is no GPU (--gpus 0)", low=1, high=1024)
    precision: Literal["bf16", "fp32"] | None = option(None, "arithmetic of the networks")
    execution: Execution = option("auto", "of a step: as written, compiled, as one CUDA graph, or (fused) both")
    workers: int = option(0, "CPU threads of a GPU's loader; 0: its share of the CPUs", low=0, high=1024)
    hw_decoder_load: float = option(0.65, "share of JPEGs for the GPU's hardware decoder (DALI)", low=0, high=1)
    seed: int = option(0, "seed of weights, order and views", low=0, high=2**63 - 1)

    # Reports and checkpoints
    log_every: int = option(50, "steps between two log lines", low=1)
    track: tuple[Tracker, ...] | None = option(None, "tools that also show the run; several: tensorboard,wandb")
    on_nan: Literal["stop", "skip"] = option("stop", "what to do about a step whose loss is NaN or infinite")
    log_samples: bool = option(False, "record the samples of every step in metrics.jsonl")
    plot: bool = option(True, "draw the curves (plot.png) at the end, if matplotlib is installed")
    checkpoint_every_epochs: int = option(1, "epochs between two checkpoints", low=1)
    checkpoint_every_minutes: float = option(30.0, "minutes between two checkpoints within an epoch; 0: none", low=0)
    keep_checkpoints: int = option(3, "newest checkpoints to keep", low=1)
    keep_every_epochs: int = option(0, "epochs between two checkpoints that are kept for good; 0: none", low=0)
    knn_every: int = option(5, "epochs between two k-NN measurements on --val-data; 0: none", low=0)
    knn_k: int = option(200, "neighbours that vote", low=1)
    knn_temperature: float = option(0.07, "temperature of their weights", low=1e-3)
    probe_every: int = option(0, "epochs between two linear probes, with all labels, on --val-data; 0: none", low=0)
    keep_best: Literal["knn", "probe", "none"] = option("none", "which accuracy's best goes to checkpoints/best.pt")
    profile: bool = option(False, "train a few steps, print where their time goes, write a trace, and stop")
    dry_run: bool = option(False, "build everything, run two steps, print shapes, memory and time, and stop")

    @property
    def trains(self) -> bool:
        """Tell whether this is a real run, not ``--dry-run`` or ``--profile``."""
        return not (self.dry_run or self.profile)

    @property
    def learns_targets(self) -> bool:
        """Tell whether the MMNN is learned, which takes some labels (paper, eq. 4)."""
        return self.consistency != "none" and self.mmnn == "learned"

    @property
    def has_composites(self) -> bool:
        """Tell whether a step trains on composites, which loaders then make."""
        asked = spec(self.auxiliary, AUXILIARIES)
        in_pairs = "auxiliary_pairs" in asked.options and self.auxiliary_pairs == "composites"
        return self.consistency != "none" or asked.composites or in_pairs

    @property
    def has_center(self) -> bool:
        """Tell whether a step needs the central crop as its original."""
        return spec(self.auxiliary, AUXILIARIES).original and not self.has_composites

    @property
    def has_parameters(self) -> bool:
        """Tell whether a step needs the parameters of the contrastive views."""
        return spec(self.auxiliary, AUXILIARIES).view_parameters and self.auxiliary_pairs == "views"

    @property
    def kept_parts(self) -> tuple[Kept, ...]:
        """Return the parts of the first view that further ones keep, if a step needs such."""
        return self.looc_kept if "looc_kept" in spec(self.auxiliary, AUXILIARIES).options else ()

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for YAML and checkpoints: texts for paths, lists."""
        return {key: _plain(value) for key, value in dataclasses.asdict(self).items()}

    def save(self, path: Path, header: str = "") -> None:
        """Write a file that ``--config`` reads back; ``header`` becomes comment lines.

        Options that concern a single start (``ONE_START``) are left out.
        """
        values = {key: value for key, value in self.to_dict().items() if key not in ONE_START}
        comment = "".join(f"# {line}\n" for line in header.splitlines())
        write_text(path, comment + yaml.safe_dump(values, sort_keys=False, allow_unicode=True))


# What runs did before an option came, which their files and checkpoints lack, where it is not the default.
BEFORE: dict[str, Any] = {"mmnn_shape": "concave", "mmnn_optimiser": "sgd"}

ONE_START = frozenset({"resume", "overwrite", "dry_run", "profile", "verify_data", "force_data", "force_ranks"})

# A run may change these when it resumes: they do not enter the arithmetic of its steps.
FREE_TO_CHANGE = ONE_START | {
    *("preset", "data", "val_data", "labels", "label_split", "loader", "on_error", "output", "init"),
    *("gpus", "max_restarts", "cpu_ranks", "workers", "hw_decoder_load", "execution"),
    *("log_every", "track", "on_nan", "log_samples", "plot", "checkpoint_every_epochs", "checkpoint_every_minutes"),
    *("keep_checkpoints", "keep_every_epochs", "knn_every", "knn_k", "knn_temperature", "probe_every", "keep_best"),
}


def labelled_batch_size(config: Config, ranks: int) -> int:
    """Return the labelled images a step: as configured, or a quarter of the batch.

    The latter is rounded down to a multiple of the ranks, but at least 2 per rank, for BatchNorm.
    """
    if config.labelled_batch_size:
        return config.labelled_batch_size
    return max(2, config.batch_size // 4 // ranks) * ranks


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    return list(value) if isinstance(value, tuple) else value
