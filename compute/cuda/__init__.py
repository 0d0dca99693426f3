"""CUDA C++: the parts that kernels share, the form of a launch, and the compiler, which needs no GPU.

NVRTC is not loaded at import.
"""
