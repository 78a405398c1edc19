"""Studies of CoCor over several seeds: ``python -m benchmarks.evidence``."""
