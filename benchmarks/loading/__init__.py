"""Loader benchmark: cases (contender x stage), how each is opened, trained on, timed and reported."""
