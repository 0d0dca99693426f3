"""CUDA C++: the parts that kernels share, the classes of launches, and the compiler, which needs no GPU.

NVRTC is not loaded when this package is imported.
"""
