"""Benchmarks that need a CUDA device; each is run by itself: `python -m benchmarks.gpu.eager`."""
