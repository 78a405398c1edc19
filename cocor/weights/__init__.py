"""Encoders from files of weights of any origin."""
