"""CUDA C++: what kernels share of it, what a launch is, and its compiler, which needs no GPU.

NVRTC is not loaded at import.
"""
