"""Executors of view programs: numba on the CPU, one CUDA kernel on the GPU, the same bits from both."""
