"""CUDA C++ that kernels share, the classes of launches, and a compiler that needs no GPU.

Importing this package does not load NVRTC.
"""
