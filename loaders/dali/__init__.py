"""NVIDIA DALI loader."""
