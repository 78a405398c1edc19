"""Data sets of the paper's evaluation: protocols, splits, archives."""
