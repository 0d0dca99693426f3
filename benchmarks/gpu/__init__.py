"""Benchmarks of the cost of cbtop on a CUDA device. They are started by hand."""
