"""The daemon: it reads the rings of the profiled processes on this machine and publishes their data.

It keeps a history and the data of ended processes.
"""
