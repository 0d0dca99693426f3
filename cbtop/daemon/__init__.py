"""The daemon: it reads the rings (memory-mapped record buffers) of the profiled processes on this machine, and
publishes their data.

It keeps a history and the data of ended processes.
"""
