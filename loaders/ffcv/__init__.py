"""FFCV loader."""
