"""Batch pipeline that all loaders share."""
