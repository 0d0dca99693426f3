"""Measures time on a CUDA device: stamps in the device's own work, and its clock compared with the host's.

This package never loads torch and does nothing at import. The driver's library is opened when it is first needed.
"""
