"""Measures time on a CUDA device by stamps: small kernels among the host's work that store the device's time. Also
compares the device's clock with the host's.

This package never loads torch and does nothing at import. It opens the driver's library when it first needs it.
"""
