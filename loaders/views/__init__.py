"""Views: which augmentations, drawn by counter-based random numbers."""
