"""Loader benchmark: cases (contender x stage), opened, timed and reported."""
