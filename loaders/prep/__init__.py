"""Preparation of image data: scan, verify, repair, convert, subset and label split. ``cocor-prep`` is its command."""
