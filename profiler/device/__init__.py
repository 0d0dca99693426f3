"""The time of a CUDA device: stamps in the device's own work, and its clock compared with the host's.

Nothing here loads torch or does anything at import: the driver's library is opened when it is first needed.
"""
