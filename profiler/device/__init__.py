"""What tells time on a CUDA device: stamps in the device's own work, and its clock beside the host's.

Nothing here loads torch, and nothing at import: the driver's library is opened by who asks for it.
"""
