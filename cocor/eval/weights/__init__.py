"""Weights: checkpoints of any origin in, other tools' formats out."""
