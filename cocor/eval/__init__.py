"""Evaluate an encoder by probes of its frozen features."""
