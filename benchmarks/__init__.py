"""Benchmarks: throughput of the loaders, cost of a step, kernels, scaling, cocor-prep, probe, and studies of CoCor."""
