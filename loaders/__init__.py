"""Data side of cocor: image bytes in, batches out. Knows nothing of learning."""

__version__ = "0.1.0"
