"""Pre-train image encoders with CoCor, contrastive learning with consistent views."""

from loaders import __version__ as __version__
