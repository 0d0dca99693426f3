"""Measures time on a CUDA device. Stamps are small kernels in the device's own work that store its time. The device's
clock is compared with the host's.

This package never loads torch and does nothing at import. The driver's library is opened when it is first needed.
"""
