"""Ranks: their environment, collectives, launch and signals."""
