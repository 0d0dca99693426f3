"""The daemon reads the rings (memory-mapped record buffers) of this machine's profiled processes, and publishes their
data.

It also stores a history, and the data of ended processes.
"""
