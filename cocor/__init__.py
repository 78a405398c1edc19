"""Pre-train image encoders with CoCor, contrastive learning with consistent views."""

__version__ = "0.1.0"
