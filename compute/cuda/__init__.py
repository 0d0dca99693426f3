"""CUDA C++ code that several kernels share, the classes for launches, and a compiler that needs no GPU.

Importing this package does not load NVRTC.
"""
