"""Data side of cocor: image bytes in, batches out. Knows nothing of learning."""
