"""One training step: composites, labelled head, optimisers and execution."""
