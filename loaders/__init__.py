"""The data side of cocor: image bytes in, :class:`loaders.batch.Batch` out. Knows nothing of learning."""
