"""Pre-train image encoders with CoCor, contrastive learning with consistent views.

Public are the names in ``__all__``, described in cocor/API.md. They are imported when they are first used, since
PyTorch takes seconds to load.
"""

import importlib
from typing import TYPE_CHECKING, Any

from loaders import __version__ as __version__

if TYPE_CHECKING:
    from cocor.backbone import build_backbone as build_backbone
    from cocor.config.options import Config as Config
    from cocor.config.resolve import configure as configure
    from cocor.methods import METHODS as METHODS
    from cocor.methods.base import Method as Method
    from cocor.methods.base import Ranks as Ranks
    from cocor.methods.base import feature_size as feature_size
    from cocor.methods.base import normalised as normalised
    from cocor.methods.moco import MoCo as MoCo
    from cocor.methods.simsiam import SimSiam as SimSiam
    from cocor.objective.consistency import latent_similarity as latent_similarity
    from cocor.objective.consistency import softplus_loss as softplus_loss
    from cocor.objective.hypergradient import exact as exact_hypergradient  # noqa: F401
    from cocor.objective.hypergradient import inner_products as inner_products
    from cocor.objective.mmnn import MMNN as MMNN
    from cocor.train import pretrain as pretrain
    from cocor.weights.load import Encoder as Encoder
    from cocor.weights.load import load_encoder as load_encoder

_HOMES = {
    "Config": "config.options", "configure": "config.resolve", "pretrain": "train",
    "load_encoder": "weights.load", "Encoder": "weights.load", "build_backbone": "backbone",
    "METHODS": "methods", "Method": "methods.base", "Ranks": "methods.base", "feature_size": "methods.base",
    "normalised": "methods.base", "MoCo": "methods.moco", "SimSiam": "methods.simsiam",
    "MMNN": "objective.mmnn", "latent_similarity": "objective.consistency", "softplus_loss": "objective.consistency",
    "inner_products": "objective.hypergradient", "exact_hypergradient": "objective.hypergradient",
}  # fmt: skip

__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = importlib.import_module(f"{__name__}.{_HOMES[name]}")
    return getattr(home, {"exact_hypergradient": "exact"}.get(name, name))
