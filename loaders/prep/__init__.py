"""Preparation of image data: what the command ``cocor-prep`` does."""
