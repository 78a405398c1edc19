"""Benchmarks of loaders, kernels, steps, scaling, cocor-prep, probe and studies."""
